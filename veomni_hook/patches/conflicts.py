"""What several configs want of one module, made into one list of steps, or refused.

Two patches on one target are an error unless one config names the other as its base, which it then wins
against. Built-in specs are defaults: they give way to any other config, and the report says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from veomni_hook.errors import PatchConflictError
from veomni_hook.patches.adopt import adopt_helper, adopt_patch
from veomni_hook.patches.plan import Origin, Step
from veomni_hook.patches.report import YieldedPatch
from veomni_hook.patches.spec import PatchConfig, PatchType
from veomni_hook.patches.verbs.targets import plain

__all__ = ["declared_steps", "is_builtin", "same_config"]

_BUILTIN = "veomni_hook.patches.models."
_EDITING = frozenset({PatchType.GUARD.value, PatchType.REWRITE.value})
_WRAPPING = frozenset({PatchType.INIT_MODIFICATION.value})


def is_builtin(config: PatchConfig) -> bool:
    """Whether the config is one of this package's own specs."""
    return config.name.startswith(_BUILTIN)


def same_config(one: PatchConfig | None, other: object) -> bool:
    """Whether two are one config, be it as patchgen made it or as it was adopted."""
    if one is None or other is None:
        return False
    made = getattr(other, "adopted_from", None)
    return (
        one is other
        or one.adopted_from is other
        or one is made
        or (made is not None and one.adopted_from is made)
    )


def declared_steps(configs: Sequence[PatchConfig], origin: Origin) -> tuple[list[Step], list[YieldedPatch]]:
    """Return the steps to carry out, in the order of the configs, and the patches that gave way.

    Raises:
        PatchConflictError: two patches claim one place.
    """
    claims = [_Claim(step) for config in configs for step in _patch_steps(config)]
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
        YieldedPatch(claim.step.kind, claim.step.target, lost[id(claim)], claim.step.config.name)
        for claim in claims
        if id(claim) in lost
    ]
    # A spec of which nothing is left brings no imports, slots or helpers either.
    alive = [c for c in configs if not c.patches or any(step.config is c for step in kept)]
    steps = []
    for config in configs:
        steps += [step for step in kept if step.config is config]
        steps += _surroundings(config) if config in alive else []
    return _without_doubles(steps, origin), yielded


@dataclass(eq=False)
class _Claim:
    step: Step

    @property
    def key(self) -> str:
        target = plain(self.step.target)
        return f"{target}.__init__" if self.step.kind in _WRAPPING else target

    @property
    def relies_on(self) -> list[str]:
        return [] if self.step.kind == "exclude" else [plain(name) for name in self.step.patch.relies_on]

    def __str__(self) -> str:
        return f"{self.step.kind} of {self.step.target} ({self.step.config.name})"


def _settle(first: _Claim, second: _Claim, origin: Origin) -> tuple[_Claim | None, str]:
    """Which of two claims gives way, and why; (None, "") if they do not meet."""
    if not (reason := _meet(first, second)):
        return None, ""
    one, other = first.step.config, second.step.config
    for loser, winner in ((first, second), (second, first)):
        if loser.step.config is winner.step.config:
            continue
        if is_builtin(loser.step.config) and not is_builtin(winner.step.config):
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
        where=f"{origin}; declared in {one.name}, {one.origin}, and {other.name}, {other.origin}",
        fix=fix,
        target=second.step.target,
    )


def _meet(first: _Claim, second: _Claim) -> str:
    for claim, other in ((first, second), (second, first)):
        for name in claim.relies_on:
            if _contains(other.key, name) or _contains(name, other.key):
                return f"{claim.step.target} relies on upstream's {name}"
    if first.key == second.key:
        kinds = {first.step.kind, second.step.kind}
        if kinds <= _EDITING and first.step.config is second.step.config:
            return ""  # several places of one function; overlaps show when they are planned
        if len(kinds) == 2 and kinds & _WRAPPING and "exclude" not in kinds:
            return ""  # modify_init wraps whatever __init__ there is
        return "same target"
    for outer, inner in ((first, second), (second, first)):
        if _contains(outer.key, inner.key) and outer.step.kind not in _EDITING | _WRAPPING:
            return f"{outer.step.target} is replaced as a whole"
    return ""


def _contains(outer: str, inner: str) -> bool:
    return f"{inner}.".startswith(f"{outer}.") and not _is_accessor(inner[len(outer) :])


def _is_accessor(rest: str) -> bool:
    """``C.p.setter`` is a definition beside ``C.p``, not one inside it."""
    return rest in (".setter", ".deleter")


def _builds_on(config: PatchConfig, base: PatchConfig) -> bool:
    seen: list[object] = []
    above: object = config.base
    while above is not None and not any(above is one for one in seen):
        if same_config(base, above):
            return True
        seen.append(above)
        above = getattr(above, "base", None)
    return False


def _patch_steps(config: PatchConfig) -> Iterator[Step]:
    for given in config.patches:
        patch = adopt_patch(given, config.name)
        yield Step(patch.patch_type.value, patch.target, patch.description or "", config, patch)
    for name in dict.fromkeys(config.exclude):
        yield Step("exclude", name, f"Leave out {name}", config, name)


def _surroundings(config: PatchConfig) -> Iterator[Step]:
    for spec in config.additional_imports:
        yield Step(PatchType.ADDITIONAL_IMPORT.value, spec.module, f"Import from {spec.module}", config, spec)
    for slot in config.slots:
        yield Step("slot", slot.name, f"Kernel slot for {slot.op}/{slot.variant}", config, slot)
    for block in config.post_import_blocks:
        if block.strip():
            first = block.strip().splitlines()[0]
            yield Step("post_import_block", first, "Code after the imports", config, block)
    for helper in config.helpers:
        yield Step("helper", _name(helper), "Helper of the patches", config, helper)
    for given in config.positioned_helpers:
        placed = adopt_helper(given)
        reason = f"Helper after {placed.target}"
        yield Step("helper", _name(placed.helper), reason, config, placed)
    for name in sorted(config.drop_imported_names):
        yield Step("drop_import", name, f"Drop upstream's import of {name}", config, name)


def _name(helper: object) -> str:
    return str(getattr(helper, "__name__", helper))


def _without_doubles(steps: list[Step], origin: Origin) -> list[Step]:
    """Things that came by two ways (an inherited helper, a shared import) are carried out once."""
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
    if step.kind == PatchType.ADDITIONAL_IMPORT.value:
        return step.kind, payload.module, tuple(payload.names or ()), payload.alias, payload.is_from_import
    if step.kind == "slot":
        return step.kind, payload
    if step.kind == "helper":
        helper = getattr(payload, "helper", payload)
        return step.kind, id(helper), getattr(payload, "target", "")
    if step.kind in ("post_import_block", "drop_import", "exclude"):
        return step.kind, payload.strip()
    return id(step)
