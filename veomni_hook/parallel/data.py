"""Which share of the data accelerate and Trainer give to this process.

Processes that share sequences read the same batches. Without gradients nothing is shared, so the loaders that
Trainer makes for evaluation divide their data among all processes: its metrics count every example once.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Protocol

from veomni_hook.parallel import process
from veomni_hook.parallel.groups import check_world

__all__ = ["count", "index", "prepared"]

_evaluating: ContextVar[bool] = ContextVar("veomni_evaluating", default=False)


class _Accelerator(Protocol):
    num_processes: int
    process_index: int
    state: object

    def prepare(self, loader: object) -> object: ...


def count(accelerator: _Accelerator) -> int:
    """Return how many shares of the data there are, for a loader that ``accelerator`` prepares.

    A script that has given accelerate a mesh of its own gets its own parallelism, and a warning.

    Raises:
        ParallelError: ``sp`` does not divide the world.
    """
    return int(accelerator.num_processes) // _size(accelerator)


def index(accelerator: _Accelerator) -> int:
    """Return which share this process reads; raises like `count`."""
    return int(accelerator.process_index) // _size(accelerator)


def prepared(accelerator: _Accelerator, loader: object, training: bool) -> object:  # noqa: FBT001 - as Trainer passes it
    """Return a loader of Trainer's, prepared by its accelerator."""
    token = _evaluating.set(not training)
    try:
        return accelerator.prepare(loader)
    finally:
        _evaluating.reset(token)


def _size(accelerator: _Accelerator) -> int:
    size = 1 if _evaluating.get() else process.sizes().sp
    if size == 1:
        return 1
    if getattr(accelerator.state, "device_mesh", None) is not None:
        process.give_way("the script gives accelerate a ParallelismConfig of its own")
        return 1
    check_world(size, accelerator.num_processes)
    return size
