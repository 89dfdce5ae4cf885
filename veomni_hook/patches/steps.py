"""The steps that the configs of one module declare, merged into one list, or an error where they conflict.

A config's patches come with its imports, blocks, helpers and slots. Two patches on one target are an
error, unless one config names the other as its base; then the base yields. This package's own patches are
defaults: routes found by idioms yield to built-in specs and to any other config, built-in specs yield to
any other config, and the report says so. A route and a guard or rewrite in one function conflict only if
they touch the same code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from veomni_hook.errors import PatchConflictError
from veomni_hook.patches.adopt import adopt_helper
from veomni_hook.patches.code.document import Document, plain
from veomni_hook.patches.plan import Origin, Plan, Step, Task
from veomni_hook.patches.report import YieldedPatch
from veomni_hook.patches.routes.config import NAME, covered, relied_on
from veomni_hook.patches.selection import is_present, selected
from veomni_hook.patches.spec import PatchConfig, PatchType
from veomni_hook.patches.verbs.guard import plan_guard
from veomni_hook.patches.verbs.rewrite import plan_rewrite
from veomni_hook.patches.verbs.runtime import IMPORT, asks

__all__ = ["EDITORS", "declared_steps", "is_builtin", "patch_steps", "same_config", "surroundings"]


def patch_steps(config: PatchConfig, document: Document) -> Iterator[Step]:
    """Yield the patches of a config that apply to the module, and its exclusions."""
    for patch, declared in selected(config, document):
        reason = patch.description or ""
        yield Step(patch.patch_type.value, patch.target, reason, config, patch, declared)
    for name in dict.fromkeys(config.exclude):
        if is_present(config, document, "exclude", name):
            yield Step("exclude", name, f"Leave out {name}", config, name)


def surroundings(config: PatchConfig, kept: Sequence[Step], document: Document) -> Iterator[Step]:
    """Yield what a config adds besides its patches; ``kept`` are the patches that are carried out."""
    for spec in config.additional_imports:
        yield Step(PatchType.ADDITIONAL_IMPORT.value, spec.module, f"Import from {spec.module}", config, spec)
    code = [step.payload.replacement for step in kept if getattr(step.payload, "replacement", None)]
    code += [*config.helpers, *(placed.helper for placed in config.positioned_helpers)]
    if not is_builtin(config) and asks(code, f"config {config.name}"):
        reason = "What the config asks of the runtime that it was written for"
        yield Step(PatchType.ADDITIONAL_IMPORT.value, IMPORT.module, reason, config, IMPORT)
    slots = config.slots
    if config.name == NAME:  # of routes, only those that a remaining one needs
        asked = {slot.name for step in kept if step.site is not None for slot in step.site.slots}
        slots = [slot for slot in slots if slot.name in asked]
    for slot in slots:
        yield Step("slot", slot.name, f"Kernel slot for {slot.op}/{slot.variant}", config, slot)
    for block in config.post_import_blocks:
        if block.strip():
            first = block.strip().splitlines()[0]
            yield Step("post_import_block", first, "Code after the imports", config, block)
    yield from _helpers(config, document)
    for name in sorted(config.drop_imported_names):
        if is_present(config, document, "drop_import", name):
            yield Step("drop_import", name, f"Drop upstream's import of {name}", config, name)


def _helpers(config: PatchConfig, document: Document) -> Iterator[Step]:
    for helper in config.helpers:
        yield Step("helper", _name(helper), "Helper of the patches", config, helper)
    for positioned in config.positioned_helpers:
        placed = adopt_helper(positioned)
        reason = f"Helper after {placed.target}"
        if is_present(config, document, "helper", placed.target):
            yield Step("helper", _name(placed.helper), reason, config, placed)


def _name(helper: object) -> str:
    return str(getattr(helper, "__name__", helper))


_BUILTIN = "veomni_hook.patches.models."
_USERS = 2
#: What plans one step that edits a part of a function, by its kind.
EDITORS: dict[str, Callable[[Task], None]] = {
    PatchType.GUARD: plan_guard,
    PatchType.REWRITE: plan_rewrite,
}
_EDITING = frozenset({*EDITORS, PatchType.ROUTE})
_MAPPING = PatchType.CLASS_MAPPING
_WRAPPING = frozenset({PatchType.INIT_MODIFICATION})


def is_builtin(config: PatchConfig) -> bool:
    """Whether the config belongs to this package."""
    return _tier(config) < _USERS


def _tier(config: PatchConfig) -> int:
    """The config's tier: a lower tier yields to a higher one."""
    if config.name == NAME:
        return 0
    return 1 if config.name.startswith(_BUILTIN) else _USERS


def same_config(one: PatchConfig | None, other: object) -> bool:
    """Whether both are the same config, in patchgen's form or adopted."""
    originals = [getattr(config, "adopted_from", None) or config for config in (one, other)]
    return one is not None and originals[0] is originals[1]


def declared_steps(
    configs: Sequence[PatchConfig], origin: Origin, document: Document
) -> tuple[list[Step], list[YieldedPatch]]:
    """Return the steps to carry out, in the order of the configs, and the patches that yielded.

    Raises:
        PatchConflictError: two patches claim the same place.
    """
    claims = [_Claim(step, document) for config in configs for step in patch_steps(config, document)]
    lost: dict[int, str] = {}
    for number, first in enumerate(claims):
        for second in claims[:number]:
            if id(first) in lost or id(second) in lost:
                continue
            loser, reason = _settle(second, first, origin)
            if loser is not None:
                lost[id(loser)] = reason
    kept = [claim.step for claim in claims if id(claim) not in lost]
    yielded = [
        YieldedPatch(step.kind, step.target, lost[id(claim)], step.config.name, *step.formula)
        for claim in claims
        if id(claim) in lost
        for step in [claim.step]
    ]
    steps = []
    for config in configs:
        own = [step for step in kept if step.config is config]
        steps += own
        # If none of a spec's patches are left, its imports, slots and helpers are dropped too.
        if own or not config.patches:
            steps += surroundings(config, own, document)
    return _without_doubles(steps, origin), yielded


@dataclass(eq=False)
class _Claim:
    step: Step
    document: Document

    @property
    def key(self) -> str:
        target = plain(self.step.target)
        if self.step.kind == _MAPPING:
            return f"{target}()"  # changes constructor calls, not the class
        return f"{target}.__init__" if self.step.kind in _WRAPPING else target

    @cached_property
    def relies_on(self) -> list[str]:
        if self.step.kind == "exclude":
            return []
        names = (
            self.step.patch.relies_on if self.step.site is None else relied_on(self.document, self.step.site)
        )
        return [plain(name) for name in names]

    def __str__(self) -> str:
        return f"{self.step.kind} of {self.step.target} ({self.step.config.name})"


def _settle(first: _Claim, second: _Claim, origin: Origin) -> tuple[_Claim | None, str]:
    """Which of two claims yields, and why; (None, "") if they do not conflict."""
    if first.step.site is not None and second.step.site is not None:
        return None, ""  # overlaps are detected during planning
    if (loser := _less_exact(first, second)) is not None:
        return loser, "a name has precedence over an expression, and an earlier expression over a later one"
    if not (reason := _meet(first, second, origin)):
        return None, ""
    one, other = first.step.config, second.step.config
    for loser, winner in ((first, second), (second, first)):
        if loser.step.config is winner.step.config:
            continue
        if _tier(loser.step.config) < _tier(winner.step.config):
            return loser, f"{winner}: {reason}"
        if _builds_on(winner.step.config, loser.step.config):
            return loser, f"{winner}, whose base {loser.step.config.name} is: {reason}"
    fix = "remove one of the two patches"
    if one is not other:
        fix = (
            f"remove one of the two, or let one config build on the other: PatchConfig(..., base={one.name})"
        )
    raise PatchConflictError(
        f"two patches claim {second.step.target}: {first} and {second} ({reason})",
        where=f"{origin}; {first.step.declaration} and {second.step.declaration}",
        fix=fix,
        target=second.step.target,
    )


def _less_exact(first: _Claim, second: _Claim) -> _Claim | None:
    """Which of two mappings of one class yields to the other because of how it names the class."""
    if first.step.kind != _MAPPING or second.step.kind != _MAPPING or first.key != second.key:
        return None
    exact = [claim.step.declared == claim.step.target for claim in (first, second)]
    if exact[0] != exact[1]:
        return second if exact[0] else first
    return second if first.step.config is second.step.config and not exact[0] else None


def _meet(first: _Claim, second: _Claim, origin: Origin) -> str:
    for claim, other in ((first, second), (second, first)):
        for name in claim.relies_on:
            if _contains(other.key, name) or _contains(name, other.key):
                return f"{claim.step.target} relies on upstream's {name}"
    if first.key == second.key:
        return "" if _share(first, second, origin) else "same target"
    for outer, inner in ((first, second), (second, first)):
        if _contains(outer.key, inner.key) and outer.step.kind not in _EDITING | _WRAPPING:
            return f"{outer.step.target} is replaced as a whole"
    return ""


def _share(first: _Claim, second: _Claim, origin: Origin) -> bool:
    """Whether two claims on one target can both be carried out."""
    kinds = {first.step.kind, second.step.kind}
    if kinds <= _EDITING and first.step.config is second.step.config:
        return True  # several places of one function; overlaps are detected during planning
    if len(kinds) == 2 and kinds & _WRAPPING and "exclude" not in kinds:
        return True  # modify_init wraps whatever __init__ there is
    planner = EDITORS.get(second.step.kind)
    if first.step.site is None or planner is None:
        return False
    # A route, which comes before all other claims, and a change of its function outside of what it covers.
    plan = Plan(first.document, origin, [second.step])
    planner(plan.tasks[0])
    ranges = covered(first.document, first.step.site)
    return not any(start <= edit.end and edit.start <= end for edit in plan.edits for start, end in ranges)


def _contains(outer: str, inner: str) -> bool:
    # ``C.p.setter`` is a definition beside ``C.p``, not one inside it.
    is_accessor = inner[len(outer) :] in (".setter", ".deleter")
    return f"{inner}.".startswith(f"{outer}.") and not is_accessor


def _builds_on(config: PatchConfig, base: PatchConfig) -> bool:
    seen: list[object] = []
    above: object = config.base
    while above is not None and not any(above is one for one in seen):
        if same_config(base, above):
            return True
        seen.append(above)
        above = getattr(above, "base", None)
    return False


def _without_doubles(steps: list[Step], origin: Origin) -> list[Step]:
    """Remove duplicates: an inherited helper or a shared import is carried out only once."""
    seen: set[object] = set()
    slots: dict[str, Step] = {}
    kept = []
    for step in steps:
        key = _identity(step)
        if key in seen:
            continue
        seen.add(key)
        if step.kind == "slot":
            other = slots.setdefault(step.target, step)
            if other is not step:
                raise PatchConflictError(
                    f"two slots are named {step.target}: {other.payload} and {step.payload}",
                    where=f"{origin}; declared in {other.config.name} and {step.config.name}",
                    fix="give one of them another name",
                    target=step.target,
                )
        kept.append(step)
    return kept


def _identity(step: Step) -> object:
    payload = step.payload
    if step.kind == PatchType.ADDITIONAL_IMPORT:
        return step.kind, payload.module, tuple(payload.names or ()), payload.alias, payload.is_from_import
    if step.kind == "slot":
        return step.kind, payload
    if step.kind == "helper":
        helper = getattr(payload, "helper", payload)
        return step.kind, id(helper), getattr(payload, "target", "")
    if step.kind in ("post_import_block", "drop_import", "exclude"):
        return step.kind, payload.strip()
    return id(step)
