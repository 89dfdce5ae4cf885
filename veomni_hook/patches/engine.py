"""From a module's source and its configs to the patched source: plan, splice, verify.

Deterministic: the same source and configs give the same text in every process. Nothing is imported. A patch
that does not apply exactly once is an error, so the report holds what was done, not what was declared.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from veomni_hook.errors import ConfigError, IdiomError, PatchTargetError, VeomniHookError
from veomni_hook.patches.adopt import adopt
from veomni_hook.patches.code.document import Document
from veomni_hook.patches.code.edit import Edit, Placed, apply_edits, marker_comment, place_edits
from veomni_hook.patches.code.nearest_names import listed
from veomni_hook.patches.idioms.recognise import recognise
from veomni_hook.patches.plan import Origin, Plan, Task
from veomni_hook.patches.report import AppliedPatch, PatchReport
from veomni_hook.patches.routes.config import NAME, missed, routes
from veomni_hook.patches.site import Site
from veomni_hook.patches.spec import PatchConfig, PatchType
from veomni_hook.patches.steps import EDITORS, declared_steps, is_builtin, same_config
from veomni_hook.patches.verbs.additions import plan_additions
from veomni_hook.patches.verbs.class_mapping import plan_class_mappings
from veomni_hook.patches.verbs.methods import plan_methods
from veomni_hook.patches.verbs.removals import plan_drops, plan_exclusions
from veomni_hook.patches.verbs.replace import plan_replacements
from veomni_hook.patches.verbs.route import plan_routes
from veomni_hook.patches.verbs.snippets import companions
from veomni_hook.patches.verify import check_names, check_overlaps, check_provided, check_text, untouched

__all__ = ["Origin", "PatchedSource", "applicable", "patch_source"]

_IN_CLASS = frozenset(
    (
        PatchType.METHOD_OVERRIDE,
        PatchType.METHOD_ADDITION,
        PatchType.INIT_MODIFICATION,
        PatchType.GUARD,
        PatchType.REWRITE,
        PatchType.ROUTE,
    )
)


def _plan_in_place(plan: Plan) -> None:
    for kind, planner in EDITORS.items():
        for task in plan.of_kind(kind):
            planner(task)


#: What plans the steps of some kinds, in this order.
_PLANNERS: tuple[tuple[Collection[str], Callable[[Plan], None]], ...] = (
    ((PatchType.CLASS_REPLACEMENT, PatchType.FUNCTION_REPLACEMENT), plan_replacements),
    ((PatchType.METHOD_OVERRIDE, PatchType.METHOD_ADDITION, PatchType.INIT_MODIFICATION), plan_methods),
    ((PatchType.GUARD, PatchType.REWRITE), _plan_in_place),
    ((PatchType.ROUTE,), plan_routes),
    ((PatchType.CLASS_MAPPING,), plan_class_mappings),
    (("drop_import",), plan_drops),
    ((PatchType.ADDITIONAL_IMPORT, "slot", "post_import_block", "helper"), plan_additions),
    (("exclude",), plan_exclusions),
)


@dataclass(frozen=True)
class PatchedSource:
    """A patched module: ``text`` with markers but no header, ``plain`` without either, and the report."""

    text: str
    plain: str
    report: PatchReport


def applicable(configs: Iterable[object], module: str, device: str) -> list[PatchConfig]:
    """Return the configs for a module on a device, each once; patchgen configs are adopted.

    A base comes before the configs that extend it. It applies even if only the extending config was given,
    provided that it is for this module and device.

    Raises:
        ConfigError: one of ``configs`` is not a patch config, or extends itself through its bases.
    """
    fitting: list[PatchConfig] = []

    def add(config: PatchConfig) -> None:
        if not config.applies_to(module) or config.device not in (None, device):
            return
        if any(same_config(known, config) for known in fitting):
            return
        if config.base is not None and not any(
            same_config(given_config, config.base) for given_config in given_configs
        ):
            add(adopt(config.base))
        fitting.append(config)

    given_configs = [adopt(config) for config in configs]
    for config in given_configs:
        _check_bases(config)
        add(config)
    return fitting


def _check_bases(config: PatchConfig) -> None:
    """Raise ConfigError if a config is among its own bases."""
    chain = [config]
    while chain[-1].base is not None:
        base = adopt(chain[-1].base)
        if any(same_config(known, base) for known in chain):
            names = " -> ".join(one.name for one in [*chain, base])
            raise ConfigError(
                f"the configs extend each other in a circle: {names}",
                where=f"declared at {config.origin}",
                fix="remove one of the bases",
            )
        chain.append(base)


def patch_source(
    source: str,
    configs: Sequence[PatchConfig],
    origin: Origin,
    *,
    device: str = "gpu",
    idioms: bool = False,
    optional: Collection[str] = (),
    left: Callable[[Site], str] = lambda site: "",
) -> PatchedSource:
    """Apply configs to the source of a module, and route what idioms find in it to kernel slots.

    If nothing applies, the text is ``source`` and the report has nothing applied.

    Args:
        source: upstream's text, decoded.
        configs: the configs to apply, all for this module and device (see `applicable`).
        origin: where the source came from, for messages and the report.
        device: ``"gpu"`` or ``"npu"``.
        idioms: whether to run idioms; a config for the same place wins over them.
        optional: the idioms to run of those that apply only with a setting
            (`veomni_hook.patches.idioms.recognise.OPTIONAL`); only with ``idioms``.
        left: returns why a site is not edited although an idiom writes edits for it, or "".

    Raises:
        ConfigError: a config is for another module or device.
        IdiomError: an idiom fails on the module or writes wrong code: any error that the configs alone do
            not cause.
        PatchError: a patch does not apply exactly once, conflicts with another, or breaks the module; each
            cause has its own class in `veomni_hook.errors`.
        SyntaxError: ``source`` is not valid Python.
    """
    configs = [adopt(config) for config in configs]
    for config in configs:
        if not config.applies_to(origin.module) or config.device not in (None, device):
            raise ConfigError(
                f"config {config.name} is for {config.source_module} on {config.device or 'any device'}",
                where=f"{origin} on {device}; declared at {config.origin}",
                fix="pass the configs that applicable() returns",
            )
    document = Document(source, origin.module)
    if not idioms:
        return _patched(document, configs, [], origin)
    found = recognise(document, optional=optional)
    sites = [site.left(why) if site.edits and (why := left(site)) else site for site in found]
    try:
        return _patched(document, configs, sites, origin)
    except IdiomError:
        raise
    except Exception as error:
        _patched(document, configs, [], origin)  # an error here is not caused by idioms
        raise _failed_routes(error, sites, origin) from error


def _patched(
    document: Document, configs: Sequence[PatchConfig], sites: Sequence[Site], origin: Origin
) -> PatchedSource:
    """Plan every step, splice, verify and report."""
    source = document.source
    routing = routes(sites, origin.module)
    steps, yielded = declared_steps([*([routing] if routing else []), *configs], origin, document)
    report = PatchReport(
        module=origin.module,
        version=origin.version,
        distribution=origin.distribution,
        yielded=tuple(yielded),
        missed=missed(sites),
    )
    if not steps:
        names = dict.fromkeys(d.qualname for d in document.definitions() if len(d.parents) == 1)
        return PatchedSource(source, source, replace(report, untouched=tuple(names)))
    plan = Plan(document, origin, steps)
    _mark_classes(plan)
    for kinds, planner in _PLANNERS:
        if plan.of_kind(*kinds):
            planner(plan)
    edits = plan.finished()
    check_overlaps(plan, edits)
    text, placed = place_edits(source, edits)
    patched = check_text(plan, text, placed)
    kept = untouched(plan, placed, patched)
    check_names(plan, placed, patched)
    check_provided(plan, placed, patched)
    report = replace(
        report,
        applied=tuple(_applied(task, placed, patched) for task in plan.tasks if not task.idle),
        untouched=kept,
        slots=tuple(task.step.payload for task in plan.of_kind("slot")),
        remarks=tuple(plan.remarks),
        companions=() if all(is_builtin(step.config) for step in steps) else companions(plan),
        wanting=tuple(plan.wanting),
    )
    plain = plan.finished(markers=False)
    return PatchedSource(text, apply_edits(source, plain, markers=False), report)


def _failed_routes(error: Exception, sites: Sequence[Site], origin: Origin) -> IdiomError:
    """The error for sites that idioms found but cannot write, or that conflict with the configs."""
    target = getattr(error, "target", "")
    ops = {site.op for site in sites if site.edits and (not target or site.target == target)}
    what = error.what if isinstance(error, VeomniHookError) else f"{type(error).__name__}: {error}"
    return IdiomError(
        f"what the idioms of {listed(sorted(ops)) if ops else NAME} write fails: {what}",
        where=error.where if isinstance(error, VeomniHookError) else str(origin),
        fix="report this as a defect of veomni-hook",
        target=target,
    )


def _mark_classes(plan: Plan) -> None:
    document = plan.document
    changed: dict[str, list[str]] = {}
    for step in plan.steps:
        if step.kind not in _IN_CLASS:
            continue
        owner, _, member = step.target.partition(".")
        if step.kind == PatchType.INIT_MODIFICATION:
            member = f"{member}.__init__".removeprefix(".")
        if any(definition.kind == "class" for definition in document.find(owner)):
            changed.setdefault(owner, []).append(member)
    for owner, names in changed.items():
        node = next(d.node for d in reversed(document.find(owner)) if d.kind == "class")
        offset = document.line_start(document.span(node)[0])
        comment = marker_comment("MODIFIED CLASS", f"{owner}: {', '.join(dict.fromkeys(names))}")
        plan.edits.append(Edit(offset, offset, f"{document.indent(node)}{comment}\n", marker=True))


def _applied(task: Task, placed: list[Placed], patched: Document) -> AppliedPatch:
    step = task.step
    # With all edits of the steps whose edits carry out this one, too.
    holders = {one.edit.patch for one in placed if task.index in one.edit.patches}
    spots = [one for one in placed if one.edit.patch in holders]
    if not spots:
        raise task.error(
            PatchTargetError,
            f"{step.kind} of {step.target} changes nothing",
            "remove it, or report this: a declared patch must apply",
        )
    ranges = []
    for one in spots:
        if one.edit.text.strip():
            lead = len(one.edit.text) - len(one.edit.text.lstrip())
            tail = len(one.edit.text) - len(one.edit.text.rstrip())
            ranges.append((patched.lineno(one.start + lead), patched.lineno(one.end - tail - 1)))
    if not ranges:
        ranges = [(patched.lineno(one.start), patched.lineno(one.start)) for one in spots]
    lines = min(start for start, _ in ranges), max(end for _, end in ranges)
    return AppliedPatch(
        task.kind,
        step.target,
        step.reason,
        step.config.name,
        *step.formula,
        lines=lines,
        declared=step.declared if step.declared != step.target else "",
    )
