"""What every slot of a model or of a patched module does, and why."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING

from veomni_hook.errors import KernelError
from veomni_hook.kernels.binding import binding_of
from veomni_hook.kernels.registry import EAGER, registry
from veomni_hook.kernels.slot import Outcome, Slot
from veomni_hook.kernels.state import STATE

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Explanation", "Row", "explain"]


@dataclass(frozen=True)
class Row:
    """One slot of one place: ``backend`` ran there last, or would if it is not ``called`` yet.

    Attributes:
        place: the module's name in the model; empty: the model itself, or a modeling module.
        kind: its class.
        slot: the slot's name in the modeling module.
        op, variant: what the slot is for.
        backend: ``eager`` is the upstream code; ``none``: a backend was chosen by name that cannot run there,
            and a call is an error.
        reason: why.
        choice: what was wanted, and in brackets who said so unless the settings did.
        called: whether it, or a fused op that it is a part of, has been asked under the choice in force.
        settled: no call can change what is said: no kernel comes into question.
    """

    place: str
    kind: str
    slot: str
    op: str
    variant: str
    backend: str
    reason: str
    choice: str
    called: bool
    settled: bool = False


@dataclass(frozen=True)
class Explanation:
    """The rows of a model or module; printed, equal ones are counted."""

    subject: str
    rows: tuple[Row, ...]

    def __str__(self) -> str:
        if not self.rows:
            return f"{self.subject}: no kernel slots; its modeling code is not patched"
        counts: dict[tuple[str, ...], int] = {}
        for row in self.rows:
            state = row.reason if row.called or row.settled else f"{row.reason}; not called yet"
            bound = f", {row.choice}" if "(" in row.choice else ""
            key = (row.kind, f"{row.op}/{row.variant}", row.backend, state + bound)
            counts[key] = counts.get(key, 0) + 1
        lines = [f"{kind} x{n}: {op}: {backend} ({why})" for (kind, op, backend, why), n in counts.items()]
        return "\n".join([f"{self.subject}:", *(f"  {line}" for line in lines)])


def explain(target: nn.Module | ModuleType, *, device: str | None = None) -> Explanation:
    """Return what each kernel slot of ``target`` last did, and why.

    ``target`` is a model (any ``nn.Module``) or an imported modeling module. For slots that have not been
    asked yet the answer is what would be asked for tensors on ``device`` (by default that of the model's
    first parameter, or the CPU). Raises KernelError if ``target`` is neither.
    """
    if isinstance(target, ModuleType):
        slots = [(name, slot) for name, slot in vars(target).items() if isinstance(slot, Slot)]
        rows = (_row("", target.__name__, name, slot, None, device or "cpu") for name, slot in slots)
        return Explanation(target.__name__, tuple(rows))
    if not callable(getattr(target, "named_modules", None)):
        raise KernelError(
            f"a {type(target).__name__} has no kernel slots",
            where="explain",
            fix="pass a model or a modeling module",
        )
    parameter = next(iter(target.parameters()), None)
    device = device or ("cpu" if parameter is None else parameter.device.type)
    return Explanation(type(target).__name__, tuple(_with_parts(list(_rows_of(target, device)))))


def _rows_of(model: nn.Module, device: str) -> Iterator[Row]:
    known: dict[type, list[tuple[str, Slot]]] = {}
    for place, module in model.named_modules():
        kind = type(module)
        if kind not in known:
            known[kind] = slots_of(kind)
        for name, slot in known[kind]:
            yield _row(place, kind.__name__, name, slot, module, device)


def _with_parts(rows: list[Row]) -> Iterator[Row]:
    """Say of places that have not been asked that a fused op around them took what they would compute."""
    taken: dict[tuple[str, str], Row] = {}
    for row in rows:
        if row.called and row.backend != EAGER:
            taken.update(((row.place, part), row) for part in registry.ops()[row.op].parts)
    for row in rows:
        around = row.place.rpartition(".")[0]
        whole = taken.get((row.place, row.op)) or (taken.get((around, row.op)) if row.place else None)
        if whole is None or row.called or row.settled:
            yield row
        else:
            yield replace(row, backend=whole.backend, reason=f"part of {whole.op}", called=True)


def slots_of(kind: type) -> list[tuple[str, Slot]]:
    """Return the slots, by name, that the methods of the module class ``kind`` ask, inherited ones too."""
    found: dict[str, Slot] = {}
    methods = {name: each for base in reversed(kind.__mro__) for name, each in vars(base).items()}
    for method in methods.values():
        if callable(method):
            function = inspect.unwrap(method)
            code, scope = getattr(function, "__code__", None), getattr(function, "__globals__", {})
            names = () if code is None else code.co_names
            found.update((name, scope[name]) for name in names if isinstance(scope.get(name), Slot))
    return list(found.items())


def _row(place: str, kind: str, name: str, slot: Slot, owner: nn.Module | None, device: str) -> Row:
    answers = slot.answers(owner)
    settled = answers.idle
    outcome = settled or (None if owner is None else slot.outcome(owner))
    called = outcome is not None and settled is None
    if outcome is None:
        selection = answers.selection(device)
        if selection.failure is not None:
            outcome = Outcome("none", f"{selection.failure}; {selection.remedy}")
        else:
            backend = EAGER if selection.kernel is None else selection.kernel.backend
            outcome = Outcome(backend, f"kernels={selection.wanted} on {device}")
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
        settled=settled is not None,
    )


def _said_by(slot: Slot, owner: nn.Module | None) -> str:
    bound = None if owner is None else binding_of(owner)
    if bound is not None and slot.op in bound:
        return " (bound)"
    said = any(context.named(slot.op) is not None for context in STATE.contexts)
    return " (use_kernels)" if said else ""
