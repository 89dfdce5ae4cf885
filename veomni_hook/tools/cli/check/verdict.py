"""Whether each declared patch of some configs applies exactly once to the installed module; used by `check`.

The engine stops at the first patch that does not apply. A report must name them all, so after a failure
each config, and then each patch, is tried alone.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import decode_source

from veomni_hook.errors import IdiomError, PatchError, VeomniHookError
from veomni_hook.finders import build
from veomni_hook.finders.upstream import Upstream
from veomni_hook.layout import counted
from veomni_hook.patches.report import AppliedPatch, PatchReport
from veomni_hook.patches.routes.config import NAME
from veomni_hook.patches.selection import unapplied
from veomni_hook.patches.spec import Patch, PatchConfig, PatchType
from veomni_hook.tools.coverage import missed

APPLIES = "applies"
YIELDS = "yields"
ABSENT = "absent"
FAILS = "FAILS"
#: What patchgen accepts and our own configs may not do: a warning in a run, an error in strict mode.
REMARK = "remark"
#: The verdict of a candidate that is not routed; a site with status `unbound` has that as its verdict.
MISSED = "missed"


@dataclass(frozen=True)
class Verdict:
    """The result for one declared patch.

    Attributes:
        module: the module that it patches.
        device: `gpu`, `npu`, or `any` if no config of the module depends on it.
        config: the config's name.
        kind: the verb.
        target: what it patches in the module.
        verdict: `applies` (exactly once), `yields` (to a user's config), `absent` (this transformers has no
            such module), `remark` (something is wrong with a config made for patchgen) or `FAILS`; `missed`
            or `unbound` for code that looks like an op but is not routed.
        detail: lines in the stored file, or why it yields or fails.
        fix: how to fix a failure.
    """

    module: str
    device: str
    config: str
    kind: str
    target: str
    verdict: str
    detail: str = ""
    fix: str = ""


def judge(
    upstream: Upstream, configs: Sequence[PatchConfig], *, idioms: bool = False
) -> tuple[list[Verdict], list[PatchReport]]:
    """Try the configs of one module together, on each device that they distinguish.

    Args:
        upstream: the installed module.
        configs: all configs that an import of the module would apply.
        idioms: whether an import would also run idioms.

    Returns:
        The verdicts, and the reports of what could be patched.
    """
    devices = sorted({config.device for config in configs if config.device is not None})
    verdicts: list[Verdict] = []
    reports: list[PatchReport] = []
    for device in devices or ["gpu"]:
        fitting = [config for config in configs if config.device in (None, device)]
        judged, report = _judge(upstream, fitting, device, device if devices else "any", idioms=idioms)
        verdicts += judged
        reports += [report] if report is not None else []
    return verdicts, reports


def failure(module: str, config: str, error: VeomniHookError, *, device: str = "any") -> Verdict:
    """Return the verdict for an error of a whole config, or of the patch that the error names."""
    target = getattr(error, "target", "") or "-"
    return Verdict(module, device, config, "-", target, FAILS, f"{error.what} ({error.where})", error.fix)


def _judge(
    upstream: Upstream, configs: Sequence[PatchConfig], device: str, shown: str, *, idioms: bool
) -> tuple[list[Verdict], PatchReport | None]:
    try:
        patched = build.patch(upstream, configs, device, idioms=idioms)
    except IdiomError as error:  # the configs' own verdicts come from a run without idioms
        verdicts, report = _judge(upstream, configs, device, shown, idioms=False)
        return [failure(upstream.module, NAME, error, device=shown), *verdicts], report
    except PatchError as error:
        verdicts = [verdict for config in configs for verdict in _probe(upstream, config, device, shown)]
        if all(verdict.verdict != FAILS for verdict in verdicts):
            together = " + ".join(config.name for config in configs)
            verdicts.append(failure(upstream.module, together, error, device=shown))
        return verdicts, None
    if patched is not None:
        report = build.stored_form(patched).report
    else:  # nothing applies: what idioms missed there is told
        sites = missed(upstream.module, decode_source(upstream.data)) if idioms else ()
        report = PatchReport(upstream.module, upstream.version, missed=sites)
    return [
        *(verdict for config in configs for verdict in _declared(config, report, shown)),
        *_beside(report, shown),
    ], report


def _beside(report: PatchReport, shown: str) -> Iterator[Verdict]:
    """Beside declared patches: remarks, routes that apply or yield, and candidates that are not routed."""
    for remark in report.remarks:
        if not remark.harmless:  # else the patch's own verdict says it
            detail = f"{remark.what} ({remark.where})"
            yield Verdict(report.module, shown, remark.config, "-", remark.target, REMARK, detail, remark.fix)
    kind = PatchType.ROUTE.value
    for one in report.applied:
        if one.kind == kind:
            detail = f"{one.op}/{one.variant}, lines {one.lines[0]}-{one.lines[1]}"
            yield Verdict(report.module, shown, NAME, kind, one.target, APPLIES, detail)
    for gave in report.yielded:
        if gave.kind == kind:
            yield Verdict(report.module, shown, NAME, kind, gave.target, YIELDS, gave.reason)
    for site in report.missed:
        yield Verdict(report.module, shown, NAME, site.op, site.target, site.status, site.reason)


def _declared(config: PatchConfig, report: PatchReport, shown: str) -> list[Verdict]:
    """Compare what a config declares with what the engine applied."""
    applied = [one for one in report.applied if one.config == config.name]
    yielded = {one.target: one.reason for one in report.yielded if one.config == config.name}
    if config.is_pattern or any(
        patch.regex for patch in config.patches
    ):  # applies where its targets are; whether it applies anywhere is checked at the end
        entries = [(one.kind, one.target, APPLIES, "lines {}-{}".format(*one.lines)) for one in applied]
        entries += [(o.kind, o.target, YIELDS, o.reason) for o in report.yielded if o.config == config.name]
        return [Verdict(report.module, shown, config.name, *one) for one in entries]
    counts = Counter((_declared_kind(config, one), one.target) for one in applied)
    lines = {(_declared_kind(config, one), one.target): "lines {}-{}".format(*one.lines) for one in applied}
    remarks = [one for one in report.remarks if one.config == config.name]
    remarked = {one.target for one in remarks if not one.harmless}
    harmless = {one.target: one.what for one in remarks if one.harmless}
    verdicts = []
    for declared in config.patches:
        kind = declared.patch_type.value
        if declared.target in remarked and not counts[kind, declared.target]:
            continue  # the remark says why it has no effect
        count = counts[kind, declared.target]
        wanted = sum(p.patch_type.value == kind and p.target == declared.target for p in config.patches)
        detail, verdict = lines.get((kind, declared.target), ""), APPLIES
        if declared.target in harmless:
            detail = f"{detail}, {harmless[declared.target]}"
        if declared.target in yielded and not count:
            detail, verdict = yielded[declared.target], YIELDS
        elif count != wanted:
            detail, verdict = f"declared {counted(wanted, 'time')}, applied {counted(count, 'time')}", FAILS
        verdicts.append(Verdict(report.module, shown, config.name, kind, declared.target, verdict, detail))
    return verdicts


def _declared_kind(config: PatchConfig, applied: AppliedPatch) -> str:
    """The verb that declared a patch: an override of a lenient config may have added the method."""
    if config.lenient and applied.kind == PatchType.METHOD_ADDITION.value:
        return PatchType.METHOD_OVERRIDE.value
    return applied.kind


def nowhere(config: PatchConfig, reports: Sequence[PatchReport]) -> list[Verdict]:
    """Return a failure for each patch of a config for a pattern that applied to none of the modules."""
    modules = config.source_module
    count = len(reports)
    none = f"does not apply to the one module that {modules} matches"
    if count != 1:
        none = f"applies to none of the {counted(count, 'module')} that {modules} matches"
    fix = "correct the target or the fingerprints; `veomni-hook list --all --by module` shows the modules"
    return [
        Verdict(
            modules,
            config.device or "any",
            config.name,
            patch.patch_type.value,
            patch.target,
            FAILS,
            f"it {none} ({config.origin})",
            fix,
        )
        for patch in unapplied(config, reports)
    ]


def _probe(upstream: Upstream, config: PatchConfig, device: str, shown: str) -> list[Verdict]:
    try:
        patched = build.patch(upstream, [config], device)
        return _declared(config, build.stored_form(patched).report, shown) if patched is not None else []
    except PatchError as error:
        verdicts = [_probe_patch(upstream, config, declared, device, shown) for declared in config.patches]
        if all(verdict.verdict != FAILS for verdict in verdicts):
            verdicts.append(failure(upstream.module, config.name, error, device=shown))
        return verdicts


def _probe_patch(
    upstream: Upstream, config: PatchConfig, declared: Patch, device: str, shown: str
) -> Verdict:
    # Dropped imports and excluded names are valid only together with all patches.
    alone = copy.copy(config)
    alone.patches, alone.exclude, alone.drop_imported_names = [declared], [], set()
    alone.label = config.name
    kind = declared.patch_type.value
    try:
        build.patch(upstream, [alone], device)
    except PatchError as error:
        detail = f"{error.what} ({error.where})"
        return Verdict(upstream.module, shown, config.name, kind, declared.target, FAILS, detail, error.fix)
    return Verdict(upstream.module, shown, config.name, kind, declared.target, APPLIES, "tried alone")
