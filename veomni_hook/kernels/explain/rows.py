"""The rows of an explanation, one a slot at a place, and their groups."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from veomni_hook.kernels.slot.candidates import REPLACED
from veomni_hook.kernels.slot.record import Calls
from veomni_hook.layout import counted

__all__ = ["MODES", "NOT_CALLED", "NO_KERNEL", "Group", "Row", "grouped"]

#: The backend of a row where the one that was chosen by name cannot run, so that a call raises an error.
NO_KERNEL = "none"

#: The backend of a row whose guard is never asked, although the model is called.
NOT_CALLED = "not called"

MODES = ("training", "evaluation")


@dataclass(frozen=True)
class Row:
    """One slot at one place: ``backend`` ran there last, or would run if it is not ``called`` yet.

    Attributes:
        place: the module's name in the model; empty for the model itself, or a modeling module.
        kind: its class.
        slot: the slot's name in the modeling module.
        op, variant: the slot's op and variant.
        backend: ``eager``: the upstream code; `NO_KERNEL`; ``replaced``: another function replaces the code,
            and the slot is not asked; `NOT_CALLED`.
        reason: why this backend.
        choice: what was chosen, followed in brackets by the source unless it was the settings.
        called: whether the slot, or a fused op that contains it, was asked or compiled by torch.compile.
        settled: no kernel can be selected, so calls cannot change this row.
        training: the calls in training by backend, that of the last call last (see
            `veomni_hook.kernels.slot.record`). Not counted: calls while no kernel could be selected, and
            calls of compiled code.
        evaluation: all other calls, but for the next ones.
        first_passes: how many calls were in the first passes of reentrant checkpoints.
        note: further information about the place.
        supplied: whether any machine has a kernel for the variant.
        compiled: ``itself`` if the row shows what torch.compile compiled for this place, ``kind`` if it shows
            what was compiled for another place that runs the same code; else empty.
        module: the modeling module whose source asks the slot there.
        asked_in: the methods that ask it, as ``Class.method``; empty if any method may.
        remedy: what lets a kernel compute what upstream's code computed last, or would; in training, if it
            was called there.
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
    training: tuple[Calls, ...] = ()
    evaluation: tuple[Calls, ...] = ()
    first_passes: int = 0
    note: str = ""
    supplied: bool = True
    compiled: str = ""
    module: str = ""
    asked_in: tuple[str, ...] = ()
    remedy: str = ""

    @property
    def backends(self) -> list[str]:
        """The backends of the last call and of all counted calls."""
        return [self.backend, *(calls.backend for mode in MODES for calls in getattr(self, mode))]

    def noted(self, note: str) -> Row:
        """Return the row with one note more."""
        return replace(self, note="; ".join(filter(None, (self.note, note))))


@dataclass(frozen=True)
class Group:
    """Rows with the same content, printed as one; ``training``: their backend in training, at last."""

    kind: str
    places: int
    op: str
    backend: str
    why: str
    calls: str
    training: str = ""

    def __str__(self) -> str:
        told = self.why if self.backend in (REPLACED, NOT_CALLED) else f"{self.backend} ({self.why})"
        return f"{self.kind} x{self.places}: {self.op}: {told}{self.calls and f', {self.calls}'}"


def grouped(rows: Iterable[Row]) -> list[Group]:
    """Return rows as they are printed: places with the same content are one group."""
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        modes = [
            (*((answer.backend, answer.reason) for answer in getattr(row, mode)), mode) for mode in MODES
        ]
        key = (row.kind, row.op, row.variant, row.backend, _why(row), *modes)
        groups.setdefault(key, []).append(row)
    return [_group(same) for same in groups.values()]


def _why(row: Row) -> str:
    state = row.reason if row.called or row.settled else f"{row.reason}; not called yet"
    bound = f", {row.choice}" if "(" in row.choice else ""
    return f"{state}{bound}{row.note and f'; {row.note}'}"


def _group(rows: Sequence[Row]) -> Group:
    first = rows[0]
    kind, op = first.kind, f"{first.op}/{first.variant}"
    training = first.training[-1].backend if first.training else ""
    return Group(kind, len(rows), op, first.backend, _why(first), _calls(rows), training)


def _calls(rows: Sequence[Row]) -> str:
    """Return the calls of all rows together, by backend where the row alone does not show it."""
    first = rows[0]
    told = []
    for mode in MODES:
        sums = [sum(getattr(row, mode)[at].times for row in rows) for at in range(len(getattr(first, mode)))]
        calls = [one._replace(times=times) for one, times in zip(getattr(first, mode), sums, strict=True)]
        if [(one.backend, one.reason) for one in calls] == [(first.backend, first.reason)]:
            told.append(f"{counted(calls[0].times, 'call')} in {mode}")
        elif calls:
            answers = ", ".join(f"{one.backend} ({one.reason}) {counted(one.times, 'call')}" for one in calls)
            told.append(f"in {mode}: {answers}")
    if first_passes := sum(row.first_passes for row in rows):
        told.append(f"{counted(first_passes, 'call')} in first passes of checkpoints")
    return "; ".join(told)
