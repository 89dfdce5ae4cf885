"""`veomni-hook check --against RELEASE`: each patch of a config against another release's sources."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from veomni_hook.patches.plan import Origin
from veomni_hook.patches.spec import PatchConfig
from veomni_hook.tools.cli import output
from veomni_hook.tools.cli.inputs.configs import BUILT_IN, Source
from veomni_hook.tools.cli.inputs.release import Releases
from veomni_hook.tools.cli.inputs.sources import SourceTree, read_source, source_tree
from veomni_hook.tools.cli.usage import UsageError
from veomni_hook.tools.facts import Facts
from veomni_hook.tools.migration.judge import FAILS, MOVED, Judgement, absent, judge
from veomni_hook.tools.migration.written import written_for

AGAINST = "--against"
WRITTEN_FOR = "--written-for"
HEADERS = ("verdict", "target", "kind", "detail")
PLURALS = {"applies": "apply", "applies, renamed": "apply with renamed parameters", "FAILS": "FAIL"}


@dataclass(frozen=True)
class Judged:
    """One config in one module of a release.

    Attributes:
        config: the config.
        module: the module that it patches.
        written_for: the release that it was made for.
        release: the release that it is judged against.
        judgements: one for each patch.
    """

    config: PatchConfig
    module: str
    written_for: str
    release: str
    judgements: Sequence[Judgement]

    @property
    def is_fine(self) -> bool:
        """Whether every patch applies or is unnecessary."""
        return all(one.is_fine for one in self.judgements)

    def rows(self) -> list[Facts]:
        """Return the judgements as `check --json` shows them."""
        return [
            {
                "module": self.module,
                "device": self.config.device or "any",
                "config": self.config.name,
                "written_for": self.written_for,
                "release": self.release,
                "kind": one.kind,
                "target": one.target,
                "verdict": one.verdict,
                "detail": one.detail,
                "fix": one.fix,
                "ops": list(one.ops),
                "concerns": [concern.name for concern in one.coverage.concerns] if one.coverage else [],
                "diff": one.diff,
            }
            for one in self.judgements
        ]


def judged(
    sources: Sequence[Source], release: str, written: str | None, wanted: Sequence[str] = ()
) -> list[Judged]:
    """Judge the configs of some config modules against a release.

    Args:
        sources: the config modules; those that cannot be loaded are skipped.
        release: a version, a wheel or a folder.
        written: the release that the configs were made for; by default what each config says, and the
            installed release for one that does not say.
        wanted: only these modules, if there are any.

    Raises:
        UsageError: a release does not exist or cannot be had, or no config is for the modules.
        ReplacementError: the code of a patch cannot be read.
    """
    configs = [config for source in sources for config in source.configs]
    judgements: list[Judged] = []
    with Releases() as releases:
        tree = releases.get(release, AGAINST)
        for config in configs:
            made_for = written or written_for(config)
            base = releases.get(made_for, WRITTEN_FOR) if made_for else source_tree()
            modules = [config.source_module]
            if config.is_pattern:
                known = {**base.files(), **base.beside(), **tree.files(), **tree.beside()}
                modules = [module for module in known if config.applies_to(module)]
            modules = [module for module in modules if not wanted or module in wanted]
            judgements += [_judged(config, module, tree, base) for module in output.track(modules, "judging")]
    if not judgements:
        raise UsageError(
            "there is no config to judge",
            where=f"the command line: {AGAINST} {release}",
            fix="name one: --config PACKAGE.MODULE; targets must be modules that it patches",
        )
    return judgements


def show(configs: Sequence[Judged], *, diffs: bool) -> None:
    """Print the judgements by config, the diffs of what moved, and the number of each verdict."""
    for one in configs:
        place = f"{one.module}, written for transformers {one.written_for}, in {one.release}"
        output.emit_heading(f"{one.config.name} ({place})")
        rows = [
            (
                patch.verdict,
                patch.target,
                patch.kind,
                "see below" if patch.verdict == FAILS else patch.detail,
            )
            for patch in one.judgements
        ]
        output.emit_table(HEADERS, rows)
        output.emit("\n")
    for one in configs:
        for patch in one.judgements:
            place = f"{one.config.name}: {patch.target}"
            if patch.verdict == FAILS:
                output.emit_text(f"{FAILS} {place}\n  {patch.detail}\n  fix: {patch.fix}\n\n")
            if patch.diff and (patch.verdict == MOVED or diffs):
                output.emit_heading(f"{patch.verdict}: {place}")
                output.emit_code(patch.diff, "diff")
                output.emit("\n")
    counts = Counter(patch.verdict for one in configs for patch in one.judgements)
    said = [f"{count} {v if count == 1 else PLURALS.get(v, v)}" for v, count in counts.items()]
    output.emit_text((", ".join(said) or "no patches") + "\n")


def made_elsewhere(sources: Sequence[Source]) -> list[str]:
    """Return a line for each of the user's configs that was made for another release than the installed."""
    configs = [config for source in sources if source.origin != BUILT_IN for config in source.configs]
    release_of = {config.name: release for config in configs if (release := written_for(config))}
    installed = source_tree().version if release_of else ""
    return [
        f"{name} was made for transformers {release}, and {installed} is installed; what changed for it:"
        f" veomni-hook check --config {name.partition(':')[0]} {AGAINST} {installed}"
        for name, release in release_of.items()
        if release != installed
    ]


def _judged(config: PatchConfig, module: str, tree: SourceTree, base: SourceTree) -> Judged:
    path, old = tree.path(module), base.path(module)
    if not module.startswith("transformers."):
        raise UsageError(
            f"{module} is not a module of transformers",
            where=f"config {config.name}",
            fix=f"{AGAINST} is for configs of transformers' modules; leave this one out",
        )
    release = f"transformers {tree.version}"
    if not os.path.isfile(path):
        return Judged(config, module, base.version, tree.version, absent(config, module, release))
    origin = Origin(module, path, "transformers", tree.version)
    before = read_source(old) if os.path.isfile(old) else None
    judgements = judge(config, read_source(path), origin, base=before, base_version=base.version)
    return Judged(config, module, base.version, tree.version, judgements)
