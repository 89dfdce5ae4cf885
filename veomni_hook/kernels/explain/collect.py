"""The rows of an explanation: one for every place of a model, or of a patched module, that asks a slot."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING

from veomni_hook.kernels.explain.infer import with_parts, with_unasked
from veomni_hook.kernels.explain.places import places_of
from veomni_hook.kernels.explain.replacements import Replacement, replacement_of
from veomni_hook.kernels.explain.rows import NO_KERNEL, Row
from veomni_hook.kernels.explain.summary import NOTHING, remedy_for
from veomni_hook.kernels.selection.binding import binding_of
from veomni_hook.kernels.selection.choice import AUTO
from veomni_hook.kernels.selection.declaration import EAGER
from veomni_hook.kernels.selection.process_choice import STATE
from veomni_hook.kernels.selection.registry import load_attribute, registry
from veomni_hook.kernels.shared.origin import home_of, name_of
from veomni_hook.kernels.slot import Outcome, Slot
from veomni_hook.kernels.slot.candidates import REPLACED
from veomni_hook.kernels.slot.guards import Guard, guards_in, slots_in

if TYPE_CHECKING:
    from torch import nn

__all__ = ["rows_of_model", "rows_of_module"]

#: Modules with functions that modules of all models call: a row is there for those that have asked.
_FUNCTIONS = ("transformers.integrations.sdpa_attention",)


def rows_of_module(module: ModuleType, device: str) -> list[Row]:
    """Return a row for each slot of a modeling module, with what it would select on ``device``."""
    rows = []
    for name, slot in slots_in(module).items():
        row = _row("", module.__name__, name, slot, None, device)
        guards = [guard for guard in guards_in(module) if guard.name == name]
        rows.append(_as_it_is_now(row, [_replacement_in(module, guard) for guard in guards]))
    return rows


def rows_of_model(model: nn.Module, device: str) -> list[Row]:
    """Return a row for each slot of each module; slots not asked yet: with what they would select."""
    rows = list(with_parts(list(_rows_of(model, device))))
    return list(with_unasked(rows))


def _rows_of(model: nn.Module, device: str) -> Iterator[Row]:
    modules = list(model.named_modules())
    places = {kind: places_of(kind) for kind in dict.fromkeys(type(module) for _, module in modules)}
    replaced = _guards_of_replaced(places)
    shared = [
        slot for name in _FUNCTIONS if (home := sys.modules.get(name)) for slot in slots_in(home).items()
    ]
    compiled = tuple(f"{place}." if place else "" for place, module in modules if _is_compiled(module))
    for place, module in modules:
        kind = type(module)
        named, inside = kind.__qualname__.rpartition(".")[2], f"{place}.".startswith(compiled)
        for name, slot, guards in places[kind]:
            row = _row(place, named, name, slot, module, device, compiled=inside)
            row = replace(row, asked_in=_asked_in([guard for _, guard in guards]))
            yield _as_it_is_now(row, [replacement_of(guard, base, kind, module) for base, guard in guards])
        for name, slot in shared:
            if slot.records.of(module) is not None:
                yield _row(place, named, name, slot, module, device, compiled=inside)
        for guard in replaced.get(kind, ()) if not places[kind] else ():
            row = _row(place, named, guard.name, guard.slot, module, device, compiled=inside)
            row = replace(row, asked_in=_asked_in([guard]))
            yield _as_it_is_now(row, [Replacement(name_of(kind), reaches=False)])


def _asked_in(guards: list[Guard]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(f"{guard.kind}.{guard.method}" for guard in guards))


def _is_compiled(module: nn.Module) -> bool:
    """Return whether this module was passed to ``torch.compile``; compiled callers cannot be detected."""
    return module._compiled_call_impl is not None or type(module).__module__ == "torch._dynamo.eval_frame"


def _guards_of_replaced(kinds: Iterable[type]) -> dict[type, list[Guard]]:
    """Return the guards of replaced classes in patched modules, by the class that replaced them."""
    bases = {base.__module__ for kind in kinds for base in kind.__mro__}
    modules = [module for name in bases if (module := sys.modules.get(name)) and slots_in(module)]
    guards: dict[type, list[Guard]] = {}
    for module in modules:
        for guard in guards_in(module):
            kind = vars(module).get(guard.kind)
            if isinstance(kind, type) and home_of(kind) != module.__name__:
                known = guards.setdefault(kind, [])
                if all(other.name != guard.name for other in known):
                    known.append(guard)
    return guards


def _replacement_in(module: ModuleType, guard: Guard) -> Replacement | None:
    """Return what replaces a guard in modules made from the class that has its name now, or None."""
    kind = vars(module).get(guard.kind)
    if not isinstance(kind, type):
        return None
    for base in kind.__mro__:
        if base.__module__ == module.__name__ and base.__qualname__ == guard.kind:
            return replacement_of(guard, base, kind)
    return Replacement(name_of(kind), reaches=False)


def _as_it_is_now(row: Row, replacements: list[Replacement | None]) -> Row:
    """Report what replaces the guards of a place, unless recorded calls already show the result."""
    others = [other for other in dict.fromkeys(replacements) if other is not None]
    if not others:
        return row
    names = ", ".join(other.name for other in others)
    unreachable = None not in replacements and not any(other.reaches for other in others)
    if not row.training and not row.evaluation and unreachable:
        reason = f"replaced by {names}"
        return replace(row, backend=REPLACED, reason=reason, called=False, settled=True, note="")
    if unreachable:
        return row.noted(f"now replaced by {names}")
    return row if row.called or row.settled else row.noted(f"behind {names}")


def _row(
    place: str,
    kind: str,
    name: str,
    slot: Slot,
    owner: nn.Module | None,
    device: str,
    *,
    compiled: bool = False,
) -> Row:
    answers = slot.answers(owner)
    record = None if owner is None else slot.records.of(owner)
    outcome, how = answers.idle, ""
    if outcome is None and owner is not None and (outcome := slot.outcome(owner)) is None:
        if (outcome := slot.traced(owner)) is not None:
            how = "itself"
        elif (outcome := slot.traced(owner, compiled=compiled)) is not None:
            how = "kind"
    called = outcome is not None and answers.idle is None
    if outcome is None and owner is not None and answers.wanted == AUTO:
        # Other settings may leave every call of the module to the upstream code.
        rule = registry.op(slot.op).bypassed
        if rule is not None and (why := load_attribute(rule)(owner, slot.variant)) is not None:
            outcome = Outcome(EAGER, why)
    if outcome is None:
        selection = answers.selection(device)
        if selection.failure is not None:
            outcome = Outcome(NO_KERNEL, f"{selection.failure}; {selection.remedy}")
        else:
            backend = EAGER if selection.kernel is None else selection.kernel.backend
            outcome = Outcome(backend, f"kernels={selection.wanted} on {device}")
    supplied = registry.supplied(slot.op, slot.variant)
    training = () if record is None else record.training.calls()
    return Row(
        place=place,
        kind=kind,
        slot=name,
        op=slot.op,
        variant=slot.variant,
        backend=outcome.backend,
        reason=outcome.reason,
        choice=f"{answers.wanted}{_said_by(slot, owner)}",
        called=called,
        settled=answers.idle is not None,
        training=training,
        evaluation=() if record is None else record.evaluation.calls(),
        first_passes=0 if record is None else sum(call.times for call in record.first_passes.calls()),
        note="; ".join(_notes(slot, owner, answers.wanted, outcome, supplied=supplied)),
        supplied=supplied,
        compiled=how,
        module=slot.module_name,
        remedy=NOTHING
        if how
        else remedy_for(answers, training[-1].reason if training else outcome.reason, device),
    )


def _notes(slot: Slot, owner: object, wanted: str, outcome: Outcome, *, supplied: bool) -> Iterator[str]:
    overrides = registry.op(slot.op).overrides
    if overrides is not None and owner is not None and wanted != AUTO:
        chosen = load_attribute(overrides)(owner, wanted)
        if chosen is not None and (wanted == EAGER or outcome.backend != EAGER):
            yield f"{wanted}, chosen by name, overrides {chosen}"
    remarks = registry.op(slot.op).remarks
    if remarks is not None and owner is not None:
        said = load_attribute(remarks)(owner, outcome.backend)
        if said is not None:
            yield said
    if not supplied and outcome.backend not in (EAGER, REPLACED, NO_KERNEL):
        yield f"no kernel exists for this formula on any machine: {outcome.backend} is the formula in PyTorch"


def _said_by(slot: Slot, owner: nn.Module | None) -> str:
    bound = None if owner is None else binding_of(owner)
    if bound is not None and slot.op in bound:
        return " (bound)"
    said = any(context.named(slot.op) is not None for context in STATE.contexts)
    return " (use_kernels)" if said else ""
