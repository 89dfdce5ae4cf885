"""What every slot of a model or of a patched module does, and why."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

from veomni_hook.errors import KernelError
from veomni_hook.kernels.registry import EAGER
from veomni_hook.kernels.slot import Outcome, Slot
from veomni_hook.kernels.state import STATE

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Explanation", "Row", "explain"]


@dataclass(frozen=True)
class Row:
    """One slot of one place: ``backend`` ran there last, or would if it is not ``called`` yet."""

    place: str
    kind: str
    slot: str
    op: str
    variant: str
    backend: str
    reason: str
    called: bool


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
            state = row.reason if row.called else f"{row.reason}; not called yet"
            key = (row.kind, f"{row.op}/{row.variant}", row.backend, state)
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
    return Explanation(type(target).__name__, tuple(_rows_of(target, device)))


def _rows_of(model: nn.Module, device: str) -> Iterator[Row]:
    for place, module in model.named_modules():
        for name, slot in slots_of(type(module)):
            yield _row(place, type(module).__name__, name, slot, slot.outcome(module), device)


def slots_of(kind: type) -> list[tuple[str, Slot]]:
    """Return the slots, by name, that the ``forward`` of the module class ``kind`` asks."""
    forward = inspect.unwrap(getattr(kind, "forward", slots_of))
    code, scope = getattr(forward, "__code__", None), getattr(forward, "__globals__", {})
    names = () if code is None else code.co_names
    return [(name, scope[name]) for name in names if isinstance(scope.get(name), Slot)]


def _row(place: str, kind: str, name: str, slot: Slot, outcome: Outcome | None, device: str) -> Row:
    called = outcome is not None
    if not STATE.active:
        outcome = Outcome(EAGER, "veomni_hook is deactivated")
    elif outcome is None:
        selection = slot.selection(device)
        backend = EAGER if selection.kernel is None else selection.kernel.backend
        outcome = Outcome(backend, f"kernels={selection.choice} on {device}")
    return Row(place, kind, name, slot.op, slot.variant, outcome.backend, outcome.reason, called)
