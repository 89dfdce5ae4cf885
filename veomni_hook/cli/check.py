"""`veomni-hook check`: every spec against the installed transformers, without importing it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from veomni_hook.cli import output
from veomni_hook.cli.target_options import JsonOption, import_from_here
from veomni_hook.cli.targets import complete_family, module_name
from veomni_hook.cli.usage import FOUND

if TYPE_CHECKING:
    from veomni_hook.cli.spec_sources import Source
    from veomni_hook.cli.verdict import Verdict

HEADERS = ("verdict", "target", "kind", "detail", "config", "device")


def check(
    targets: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TARGET]...",
            help="Only these families or modules.",
            autocompletion=complete_family,
            show_default=False,
        ),
    ] = None,
    config: Annotated[
        list[str] | None,
        typer.Option(
            "--config",
            metavar="PACKAGE.MODULE[:NAME]",
            help="Check this config too; may be repeated.",
            show_default=False,
        ),
    ] = None,
    *,
    as_json: JsonOption = False,
) -> None:
    """Check that every patch, built-in or configured, applies exactly once to the installed transformers.

    Exits with 1 when one does not, with what to do about each.
    """
    from veomni_hook.cli.spec_sources import OPTION, load_sources, names
    from veomni_hook.cli.verdict import FAILS
    from veomni_hook.settings import resolve

    import_from_here()
    wanted = [module_name(target) for target in targets or ()]
    sources = load_sources([*names(resolve().settings), *((OPTION, name) for name in config or ())])
    verdicts = list(_verdicts(sources, wanted))
    if as_json:
        output.emit_json([verdict.to_dict() for verdict in verdicts])
    else:
        _print(verdicts)
    if any(verdict.verdict == FAILS for verdict in verdicts):
        raise typer.Exit(FOUND)


def _verdicts(sources: Sequence[Source], wanted: Sequence[str]) -> Iterator[Verdict]:
    from veomni_hook.cli.spec_sources import BUILT_IN
    from veomni_hook.cli.verdict import ABSENT, Verdict, failure, judge
    from veomni_hook.errors import ConfigError
    from veomni_hook.finders.locate import locate
    from veomni_hook.finders.pipeline import read_upstream

    for source in sources:
        if source.error is not None:
            yield failure("-", source.name, source.error)
    modules = dict.fromkeys(config.source_module for source in sources for config in source.configs)
    chosen = [module for module in modules if not wanted or module in wanted]
    for module in output.track(chosen, "checking"):
        held = [(s, c) for s in sources for c in s.configs if c.source_module == module]
        spec = locate(module)
        upstream, reason = (None, "not installed") if spec is None else read_upstream(module, spec)
        if upstream is not None:
            yield from judge(upstream, [config for _, config in held])
            continue
        for source, config in held:
            if source.origin == BUILT_IN and spec is None:
                detail = "this transformers has no such module"
                yield Verdict(module, "any", config.name, "-", "-", ABSENT, detail)
            else:
                fix = "correct the config's source_module"
                yield failure(module, config.name, ConfigError(reason, where=config.origin, fix=fix))


def _print(verdicts: Sequence[Verdict]) -> None:
    from veomni_hook.cli.verdict import FAILS

    for module in dict.fromkeys(verdict.module for verdict in verdicts):
        output.emit_heading(module)
        rows = [_row(verdict) for verdict in verdicts if verdict.module == module]
        output.emit_table(HEADERS, [[row[header] for header in HEADERS] for row in rows])
        output.emit("\n")
    failed = [verdict for verdict in verdicts if verdict.verdict == FAILS]
    for verdict in failed:
        place = f"{verdict.module}: {verdict.target}"
        output.emit(f"{FAILS} {place}\n  {verdict.detail}\n  fix: {verdict.fix}\n\n")
    counts = Counter(verdict.verdict for verdict in verdicts)
    output.emit((", ".join(f"{count} {verdict}" for verdict, count in counts.items()) or "no patches") + "\n")


def _row(verdict: Verdict) -> dict[str, str]:
    from veomni_hook.cli.verdict import FAILS

    row = verdict.to_dict()
    return {**row, "detail": "see below"} if verdict.verdict == FAILS else row
