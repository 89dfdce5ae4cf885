"""Counts of how the calls of one module at one slot were computed, in training and in evaluation.

Training is a call of a module in training mode with gradients enabled. A forward that a checkpoint recomputes
counts as another call. The first pass of a reentrant checkpoint has no gradients: it is counted apart, and
its second pass is training. Everything else is evaluation: eval mode, ``torch.no_grad()``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import ref

from veomni_hook.kernels.slot.candidates import Outcome

__all__ = ["FIRST_CALL", "Calls", "Record", "Records", "Tally"]

#: Called at the first call of each module, with the name of the patched module and the module.
FIRST_CALL: list[Callable[[str, Any], None]] = []


class Calls(NamedTuple):
    """How many calls one backend got (``eager``: the upstream code), and the reason for the last one."""

    backend: str
    reason: str
    times: int


class Tally:
    """The calls of one mode; a call that repeats the previous outcome writes only `last` and `run`.

    Attributes:
        last: the outcome of the last call; None before the first.
        run: how many consecutive calls had this outcome.
    """

    __slots__ = ("_counts", "_reasons", "last", "run")

    def __init__(self) -> None:
        self.last: Outcome | None = None
        self.run = 0
        # By backend: reasons may contain shapes, so their number is unbounded.
        self._counts: dict[str, int] = {}
        self._reasons: dict[str, str] = {}

    def turn(self, outcome: Outcome) -> None:
        """Count a call whose outcome differs from that of the previous call."""
        if (last := self.last) is not None:
            self._counts[last.backend] = self._counts.get(last.backend, 0) + self.run
            self._reasons[last.backend] = last.reason
        self.last, self.run = outcome, 1

    def calls(self) -> tuple[Calls, ...]:
        """Return the calls by backend, that of the last call last."""
        if (last := self.last) is None:
            return ()
        before = self._counts.get(last.backend, 0)
        others = ((name, count) for name, count in self._counts.items() if name != last.backend)
        earlier = (Calls(name, self._reasons[name], count) for name, count in others)
        return (*earlier, Calls(last.backend, last.reason, before + self.run))


class Record:
    """The calls of the module that ``owner`` refers to; ``latest`` is the tally of its last call."""

    __slots__ = ("evaluation", "first_passes", "latest", "owner", "training")

    def __init__(self, owner: ref[object]) -> None:
        self.owner = owner
        self.training = Tally()
        self.evaluation = Tally()
        self.first_passes = Tally()
        self.latest = self.evaluation


class Records(dict[int, Record]):
    """The records of the modules that have asked a slot, by id.

    With a weak reference in each: a WeakKeyDictionary would cost 1.5 us at every call.
    """

    def __init__(self, module_name: str, in_first_pass: Callable[[], bool]) -> None:
        super().__init__()
        self._module_name = module_name
        self._in_first_pass = in_first_pass

    def of(self, owner: object) -> Record | None:
        """Return the recorded calls of the module ``owner``, or None."""
        record = self.get(id(owner))
        return record if record is not None and record.owner() is owner else None

    def note(self, owner: Any, outcome: Outcome, recorded: bool) -> None:
        """Count a call of the module ``owner``; ``recorded``: with gradients enabled."""
        record = self.get(id(owner))
        if record is None or record.owner() is not owner:
            record = self._begin(owner)
        try:
            training = owner.training
        except AttributeError:
            training = False  # not a module
        if not training:
            tally = record.latest = record.evaluation
        elif recorded:
            tally = record.latest = record.training
        else:
            tally = record.latest = record.first_passes if self._in_first_pass() else record.evaluation
        if tally.last is outcome:
            tally.run += 1
        else:
            tally.turn(outcome)

    def _begin(self, owner: object) -> Record:
        """Create the record of a module at its first call."""
        key = id(owner)
        record = self[key] = Record(ref(owner, lambda _: self.pop(key, None)))
        for notice in FIRST_CALL:
            notice(self._module_name, owner)
        return record
