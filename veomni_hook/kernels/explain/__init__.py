"""What every slot of a model or of a patched module does, and why."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from veomni_hook.errors import KernelError
from veomni_hook.kernels.explain.explanation import MODES, UNASKED, Explanation, Row
from veomni_hook.kernels.explain.replacements import Standing, home_of, name_of, overridden, standing
from veomni_hook.kernels.selection.binding import binding_of
from veomni_hook.kernels.selection.choice import AUTO
from veomni_hook.kernels.selection.process_choice import STATE
from veomni_hook.kernels.selection.registry import EAGER, load_attribute, registry
from veomni_hook.kernels.slot import Outcome, Slot
from veomni_hook.kernels.slot.candidates import REPLACED
from veomni_hook.kernels.slot.guards import Guard, guards_in, guards_of, slots_in
from veomni_hook.kernels.slot.liger_warning import warn_of_stacked

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Explanation", "Row", "explain", "places_of", "slots_of"]


class Place(NamedTuple):
    """A slot that modules of a class use, its name there, and its guards with their classes."""

    name: str
    slot: Slot
    guards: tuple[tuple[type, Guard], ...]


def explain(target: nn.Module | ModuleType, *, device: str | None = None) -> Explanation:
    """Return what each kernel slot of ``target`` last did, and why.

    ``target`` is a model (any ``nn.Module``) or an imported modeling module. Slots that have not been asked
    yet report what they would select for tensors on ``device`` (default: the device of the model's first
    parameter, or the CPU). Warns once per process if Liger's functions replace patched code. Raises
    KernelError if ``target`` is neither.
    """
    warn_of_stacked(target)
    if isinstance(target, ModuleType):
        slots = slots_in(target).items()
        told = (_of_module(target, name, slot, device or "cpu") for name, slot in slots)
        return Explanation(target.__name__, tuple(told), (target.__name__,))
    if not callable(getattr(target, "named_modules", None)):
        raise KernelError(
            f"a {type(target).__name__} has no kernel slots",
            where="explain",
            fix="pass a model or a modeling module",
        )
    parameter = next(iter(target.parameters()), None)
    device = device or ("cpu" if parameter is None else parameter.device.type)
    rows = list(_with_parts(list(_rows_of(target, device))))
    return Explanation(type(target).__name__, tuple(_with_unasked(rows)), _modules_of(target, rows))


def _modules_of(model: nn.Module, rows: list[Row]) -> tuple[str, ...]:
    """Return the modeling modules of a model's classes and of ``rows``, without duplicates."""
    homes = dict.fromkeys(type(module).__module__ for module in model.modules())
    modeling = [home for home in homes if home.rpartition(".")[2].startswith("modeling_")]
    return tuple(dict.fromkeys([*modeling, *(row.module for row in rows)]))


def places_of(kind: type) -> list[Place]:
    """Return the slots that modules of ``kind`` use, or would use if no method had been replaced."""
    guards: dict[str, list[tuple[type, Guard]]] = {}
    slots = dict(slots_of(kind))
    for base, guard in guards_of(kind):
        if not overridden(guard, base, kind):
            slots.setdefault(guard.name, guard.slot)
            guards.setdefault(guard.name, []).append((base, guard))
    return [Place(name, slot, tuple(guards.get(name, ()))) for name, slot in slots.items()]


def slots_of(kind: type) -> list[tuple[str, Slot]]:
    """Return the slots, by name, that the methods of the module class ``kind`` use, inherited ones too."""
    found: dict[str, Slot] = {}
    methods = {name: each for base in reversed(kind.__mro__) for name, each in vars(base).items()}
    for method in methods.values():
        if callable(method):
            function = inspect.unwrap(method)
            code, scope = getattr(function, "__code__", None), getattr(function, "__globals__", {})
            names = () if code is None else code.co_names
            found.update((name, scope[name]) for name in names if isinstance(scope.get(name), Slot))
    return list(found.items())


def _rows_of(model: nn.Module, device: str) -> Iterator[Row]:
    modules = list(model.named_modules())
    known = {kind: places_of(kind) for kind in dict.fromkeys(type(module) for _, module in modules)}
    others = _taken_out(known)
    compiled = tuple(f"{place}." if place else "" for place, module in modules if _is_compiled(module))
    for place, module in modules:
        kind = type(module)
        named, inside = kind.__qualname__.rpartition(".")[2], f"{place}.".startswith(compiled)
        for each in known[kind]:
            row = _row(place, named, each.name, each.slot, module, device, compiled=inside)
            row = replace(row, asked_in=_asked_in([guard for _, guard in each.guards]))
            yield _as_it_stands(row, [standing(guard, base, kind, module) for base, guard in each.guards])
        for guard in others.get(kind, ()) if not known[kind] else ():
            row = _row(place, named, guard.name, guard.slot, module, device, compiled=inside)
            row = replace(row, asked_in=_asked_in([guard]))
            yield _as_it_stands(row, [Standing(name_of(kind), reaches=False)])


def _asked_in(guards: list[Guard]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(f"{guard.kind}.{guard.method}" for guard in guards))


def _is_compiled(module: nn.Module) -> bool:
    """Return whether this module was passed to ``torch.compile``; compiled callers cannot be detected."""
    return module._compiled_call_impl is not None or type(module).__module__ == "torch._dynamo.eval_frame"


def _taken_out(known: dict[type, list[Place]]) -> dict[type, list[Guard]]:
    """Return the guards of replaced classes in patched modules, by the class that replaced them."""
    bases = {base.__module__ for kind in known for base in kind.__mro__}
    modules = [module for name in bases if (module := sys.modules.get(name)) and slots_in(module)]
    found: dict[type, list[Guard]] = {}
    for module in modules:
        for guard in guards_in(module):
            kind = vars(module).get(guard.kind)
            if isinstance(kind, type) and home_of(kind) != module.__name__:
                held = found.setdefault(kind, [])
                if all(each.name != guard.name for each in held):
                    held.append(guard)
    return found


def _of_module(module: ModuleType, name: str, slot: Slot, device: str) -> Row:
    row = _row("", module.__name__, name, slot, None, device)
    guards = [guard for guard in guards_in(module) if guard.name == name]
    return _as_it_stands(row, [_in_module(guard, module) for guard in guards])


def _in_module(guard: Guard, module: ModuleType) -> Standing | None:
    """Return what replaces a guard in modules made from the class that has its name now, or None."""
    kind = vars(module).get(guard.kind)
    if not isinstance(kind, type):
        return None
    for base in kind.__mro__:
        if base.__module__ == module.__name__ and base.__qualname__ == guard.kind:
            return standing(guard, base, kind)
    return Standing(name_of(kind), reaches=False)


def _as_it_stands(row: Row, found: list[Standing | None]) -> Row:
    """Report what replaces the guards, unless recorded calls already show the result."""
    others = [each for each in dict.fromkeys(found) if each is not None]
    if not others:
        return row
    names = ", ".join(each.name for each in others)
    unreachable = None not in found and not any(each.reaches for each in others)
    if not row.training and not row.evaluation and unreachable:
        reason = f"replaced by {names}"
        return replace(row, backend=REPLACED, reason=reason, called=False, settled=True, note="")
    if unreachable:
        return _noted(row, f"now replaced by {names}")
    return row if row.called or row.settled else _noted(row, f"behind {names}")


def _noted(row: Row, note: str) -> Row:
    return replace(row, note="; ".join(filter(None, (row.note, note))))


def _with_parts(rows: list[Row]) -> Iterator[Row]:
    """Mark places that were not asked because an enclosing fused op computed their part."""
    taken: dict[tuple[str, str], Row] = {}
    for row in rows:
        if row.called and any(backend != EAGER for backend in _backends(row)):
            taken.update(((row.place, part), row) for part in registry.ops()[row.op].parts)
    for row in rows:
        around = row.place.rpartition(".")[0]
        whole = taken.get((row.place, row.op)) or (taken.get((around, row.op)) if row.place else None)
        yield row if whole is None or row.settled else _as_a_part(row, whole)


def _backends(row: Row) -> list[str]:
    return [row.backend, *(each.backend for mode in MODES for each in getattr(row, mode))]


def _as_a_part(row: Row, whole: Row) -> Row:
    """Return ``row`` with the calls of ``whole`` for the modes in which it has none."""
    reason = f"part of {whole.op}"
    for mode in MODES:
        taken = tuple(each._replace(reason=reason) for each in getattr(whole, mode) if each.backend != EAGER)
        if taken and not getattr(row, mode):
            in_training = mode == "training"
            row = replace(row, training=taken) if in_training else replace(row, evaluation=taken)
    if (row.called and row.compiled != "kind") or whole.backend == EAGER:
        return row
    return replace(row, backend=whole.backend, reason=reason, called=True)


def _with_unasked(rows: list[Row]) -> Iterator[Row]:
    """Mark places that are not asked although the modules below them are called, and say what that means."""
    for row in rows:
        said = registry.ops()[row.op].variants[row.variant].unasked
        modes = [] if not said or row.settled else _modes_below(row, rows)
        if not modes or (row.called and "training" not in modes):
            yield row
        elif row.called:
            yield _noted(row, f"in training, {said}")
        else:
            yield replace(row, backend=UNASKED, reason=f"in {' and '.join(modes)}, {said}", settled=True)


def _modes_below(row: Row, rows: list[Row]) -> list[str]:
    """Return the modes in which modules below a place are called and the place itself is not."""
    inside = f"{row.place}." if row.place else ""
    below = [each for each in rows if each.place.startswith(inside) and each.place != row.place]
    modes = [mode for mode in MODES if any(getattr(each, mode) for each in below)]
    if not modes and any(each.called for each in below):
        modes = ["compiled calls"]
    return [mode for mode in modes if mode == "compiled calls" or not getattr(row, mode)]


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
    record = None if owner is None else slot.record(owner)
    outcome, how = answers.idle, ""
    if outcome is None and owner is not None and (outcome := slot.outcome(owner)) is None:
        outcome = slot.traced(owner) or slot.traced(owner, compiled=compiled)
        how = "" if outcome is None else "itself" if slot.traced(owner) is not None else "kind"
    called = outcome is not None and answers.idle is None
    if outcome is None:
        selection = answers.selection(device)
        if selection.failure is not None:
            outcome = Outcome("none", f"{selection.failure}; {selection.remedy}")
        else:
            backend = EAGER if selection.kernel is None else selection.kernel.backend
            outcome = Outcome(backend, f"kernels={selection.wanted} on {device}")
    supplied = registry.supplied(slot.op, slot.variant)
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
        training=() if record is None else record.training.calls(),
        evaluation=() if record is None else record.evaluation.calls(),
        note="; ".join(_notes(slot, owner, answers.wanted, outcome, supplied=supplied)),
        supplied=supplied,
        compiled=how,
        module=slot.module_name,
    )


def _notes(slot: Slot, owner: Any, wanted: str, outcome: Outcome, *, supplied: bool) -> Iterator[str]:
    overrides = registry.ops()[slot.op].overrides
    if overrides is not None and owner is not None and wanted != AUTO:
        chosen = load_attribute(overrides)(owner, wanted)
        if chosen is not None and (wanted == EAGER or outcome.backend != EAGER):
            yield f"{wanted}, chosen by name, overrides {chosen}"
    if not supplied and outcome.backend not in (EAGER, REPLACED, "none"):
        yield f"no kernel exists for this formula on any machine: {outcome.backend} is the formula in PyTorch"


def _said_by(slot: Slot, owner: nn.Module | None) -> str:
    bound = None if owner is None else binding_of(owner)
    if bound is not None and slot.op in bound:
        return " (bound)"
    said = any(context.named(slot.op) is not None for context in STATE.contexts)
    return " (use_kernels)" if said else ""
