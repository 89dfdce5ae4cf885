"""`veomni-hook migrate`: explain a patchgen config, and write one with only the patches still needed."""

from __future__ import annotations

import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from veomni_hook.tools.cli import output
from veomni_hook.tools.cli.inputs.options import JsonOption, WrittenForOption, import_from_here
from veomni_hook.tools.cli.usage import FOUND, UsageError, write_file
from veomni_hook.tools.facts import Facts

if TYPE_CHECKING:
    from veomni_hook.finders.upstream import Upstream
    from veomni_hook.patches.spec import PatchConfig
    from veomni_hook.tools.migration.reduce import Reduced

HEADERS = ("outcome", "target", "reason")


def migrate(
    config: Annotated[
        str,
        typer.Argument(metavar="PACKAGE.MODULE[:NAME]", help="The config.", show_default=False),
    ],
    file: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Write the reduced config to this file.",
            show_default=False,
        ),
    ] = None,
    written_for: WrittenForOption = None,
    *,
    force: Annotated[bool, typer.Option("--force", help="Overwrite FILE.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Explain a patchgen config patch by patch, and write a config with only the patches still needed.

    The outcome of a patch is one of these:

    covered: idioms route what it is for to kernels, or upstream itself does it. It is left out.

    kept: it is needed. The reason says what is missing here, for what, and what there is of it.

    left out: it is needed but does not apply to the installed transformers. The reason says where its target
    may be now; write it anew.

    The written file is a config of veomni-hook. It imports the kept functions from the original config and is
    checked as `veomni-hook check` does it.

    Exits with 1 if a patch is left out, or if the written config does not pass.
    """
    from veomni_hook.tools.migration.emit import emit
    from veomni_hook.tools.migration.reduce import LEFT_OUT

    import_from_here()
    if file is not None and file.exists() and not force:
        raise UsageError("the file exists", where=str(file), fix="name another one, or overwrite it: --force")
    reduced, release, base_version, upstream = _reduced(config, written_for)
    text = emit(reduced, release=release, written_for=base_version) if reduced.patches else ""
    problems = _checked(text, upstream) if text else []
    if as_json:
        output.emit_json(_document(reduced, release, base_version, text, problems))
    else:
        _show(reduced, release, base_version)
    if file is not None and text:
        write_file(file, text, "the reduced config")
        output.note(f"wrote {file}")
    elif file is not None:
        output.note(f"nothing to write: {reduced.config.name} is not needed any more")
    for problem in problems:
        output.warn(f"the reduced config does not pass `veomni-hook check`: {problem}")
    if problems or any(one.outcome == LEFT_OUT for one in reduced.explained):
        raise typer.Exit(FOUND)


def _reduced(name: str, written: str | None) -> tuple[Reduced, str, str, Upstream]:
    """Judge the config against the installed release; the releases are the installed and the one made for."""
    from veomni_hook.patches.plan import Origin
    from veomni_hook.tools.cli.inputs.release import Releases
    from veomni_hook.tools.cli.inputs.sources import read_source, source_tree
    from veomni_hook.tools.migration.judge import judge
    from veomni_hook.tools.migration.reduce import reduce
    from veomni_hook.tools.migration.written import written_for

    config = _one(name)
    upstream = _installed(config)
    source = read_source(upstream.path)
    tree = source_tree()
    base_version = tree.version
    before: str | None = source
    release = written or written_for(config)
    if release and upstream.distribution == "transformers":
        with Releases() as releases:
            base = releases.get(release, "--written-for")
            path = base.path(config.source_module)
            base_version, before = base.version, read_source(path) if os.path.isfile(path) else None
    origin = Origin(config.source_module, upstream.path, upstream.distribution, tree.version)
    judgements = judge(config, source, origin, base=before, base_version=base_version)
    return reduce(config, judgements, source, origin), tree.version, base_version, upstream


def _one(name: str) -> PatchConfig:
    """Load the one config that the user named."""
    from veomni_hook.patches.spec import PatchType
    from veomni_hook.tools.cli.inputs.configs import OPTION, load_all

    (source,) = load_all([(OPTION, name)])
    if len(source.configs) != 1:
        names = ", ".join(config.name for config in source.configs)
        fix = f"name one: PACKAGE.MODULE:NAME (it holds {names})"
        raise UsageError(f"{name} holds {len(source.configs)} configs", where=f"config {name}", fix=fix)
    (config,) = source.configs
    own = {PatchType.GUARD, PatchType.REWRITE, PatchType.ROUTE, PatchType.CLASS_MAPPING}
    if config.is_pattern or config.slots or any(patch.patch_type in own for patch in config.patches):
        raise UsageError(
            f"{config.name} is not for patchgen: it has a pattern of modules, guards, rewrites or slots",
            where=f"config {name}",
            fix="keep it as it is; `veomni-hook check` says whether it applies",
        )
    return config


def _installed(config: PatchConfig) -> Upstream:
    from veomni_hook.finders.upstream import read_upstream
    from veomni_hook.locate import locate

    spec = locate(config.source_module)
    upstream, reason = (
        (None, "it is not installed") if spec is None else read_upstream(config.source_module, spec)
    )
    if upstream is None:
        raise UsageError(
            f"there is no source of {config.source_module}: {reason}",
            where=f"config {config.name}",
            fix="install a transformers that has it",
        )
    return upstream


def _checked(text: str, upstream: Upstream) -> list[str]:
    """Load the text as a config and judge it as `veomni-hook check` does; return what fails."""
    from veomni_hook.errors import ConfigError
    from veomni_hook.finders.configs import load
    from veomni_hook.tools.cli.check.verdict import FAILS, judge

    name = f"veomni_hook_reduced_{os.getpid()}"
    with tempfile.TemporaryDirectory(prefix="veomni-hook-") as folder:
        Path(folder, f"{name}.py").write_text(text, encoding="utf-8")
        sys.path.insert(0, folder)
        try:
            (loaded,) = load([name])
            verdicts, _ = judge(upstream, loaded.configs, idioms=True)
        except ConfigError as error:
            return [error.what]
        finally:
            sys.path.remove(folder)
            sys.modules.pop(name, None)
    return [f"{one.target}: {one.detail}" for one in verdicts if one.verdict == FAILS]


def _show(reduced: Reduced, release: str, base_version: str) -> None:
    config = reduced.config
    output.emit_heading(
        f"{config.name} ({config.source_module}, written for transformers {base_version}, on {release})"
    )
    rows = [(one.outcome, one.judgement.target, one.reason) for one in reduced.explained]
    output.emit_table(HEADERS, rows)
    counts = Counter(one.outcome for one in reduced.explained)
    said = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
    output.emit_text(f"\n{said or 'no patches'}\n")


def _document(reduced: Reduced, release: str, made: str, text: str, problems: list[str]) -> Facts:
    return {
        "config": reduced.config.name,
        "module": reduced.config.source_module,
        "device": reduced.config.device or "any",
        "written_for": made,
        "release": release,
        "patches": [
            {
                "target": one.judgement.target,
                "kind": one.judgement.kind,
                "outcome": one.outcome,
                "reason": one.reason,
                "ops": list(one.judgement.ops),
                "concerns": [c.name for c in one.judgement.coverage.concerns]
                if one.judgement.coverage
                else [],
            }
            for one in reduced.explained
        ],
        "problems": problems,
        "reduced": text,
    }
