"""Keeps the routing of a checkpointed forward for its recompute.

A recomputed router may decide differently (its input is rounded anew, or a kernel sums in another order).
Ranks would then exchange other rows than the forward did. So the first pass through a checkpointed function
records what each of its experts dispatched, and every later pass uses that.

A pass is known by the function that is checkpointed: `recorded` gives `torch.utils.checkpoint` a function
that remembers how often it ran. This works for both forms of checkpointing and for any order of backward
passes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any

from torch.utils.checkpoint import checkpoint as of_torch

__all__ = ["Record", "checkpoint", "current", "record_checkpoints", "recorded"]


@dataclass(eq=False)
class Record:
    """What one checkpointed function dispatched, in order.

    Attributes:
        replaying: a pass was complete or failed before; entries are read, not added.
    """

    replaying: bool = False
    _entries: list[tuple[object, Any]] = field(default_factory=list)
    _next: int = 0

    def run(self, function: Callable[..., object], *args: object, **kwargs: object) -> Any:
        """Call ``function``; `current` returns this record in it."""
        self._next = 0
        token = _CURRENT.set(self)
        try:
            return function(*args, **kwargs)
        finally:
            _CURRENT.reset(token)
            self.replaying = True

    def take(self, owner: object, make: Callable[[], object]) -> Any:
        """Return what ``make`` returned in the first pass at this point, where ``owner`` asked for it.

        Raises:
            RuntimeError: the recompute asks in another order than the forward did.
        """
        if not self.replaying:
            self._entries.append((owner, make()))
            return self._entries[-1][1]
        if self._next >= len(self._entries) or self._entries[self._next][0] is not owner:
            raise RuntimeError(
                "a checkpointed function calls other experts when it is recomputed than in its forward; "
                "the recompute of a checkpoint must call the same modules in the same order"
            )
        self._next += 1
        return self._entries[self._next - 1][1]


_CURRENT: ContextVar[Record | None] = ContextVar("veomni_expert_record", default=None)


def current() -> Record | None:
    """Return the record of the checkpointed function that runs now, or None."""
    return _CURRENT.get()


def recorded(function: Callable[..., object]) -> Callable[..., Any]:
    """Return ``function`` for one call of a checkpoint: its recompute dispatches as its first pass did."""
    outer = _CURRENT.get()
    record = Record() if outer is None else outer.take(recorded, Record)
    return partial(record.run, function)


@wraps(of_torch)
def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`torch.utils.checkpoint.checkpoint`, with the same routing of experts in the recompute."""
    return of_torch(recorded(function), *args, **kwargs)


def record_checkpoints() -> None:
    """Let transformers' checkpointed layers record. Changes ``transformers.modeling_utils.checkpoint``.

    Models on which checkpointing was enabled before keep the function that they have.
    """
    # Only in processes that dispatch experts: `modeling_utils` is large.
    from transformers import modeling_utils

    if modeling_utils.checkpoint is of_torch:
        modeling_utils.checkpoint = checkpoint
