"""Which share of the data accelerate and Trainer give to this process.

Processes that share sequences read the same batches. Without gradients nothing is shared, so the loaders that
Trainer makes for evaluation divide their data among all processes: its metrics count every example once.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Protocol

from veomni_hook.parallel import process
from veomni_hook.parallel.groups import check_world

__all__ = ["count", "index", "mesh", "prepared"]

_evaluating: ContextVar[bool] = ContextVar("veomni_evaluating", default=False)


class _Accelerator(Protocol):
    num_processes: int
    process_index: int
    state: object

    def prepare(self, loader: object) -> object: ...


def count(accelerator: _Accelerator) -> int:
    """Return how many shares of the data there are, for a loader that ``accelerator`` prepares.

    A script that has accelerate divide models or sequences in its own way gets that, and a warning.

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


def mesh(accelerator: _Accelerator, own: object) -> object:
    """Return the mesh that divides a loader's data: ``own``, the script's; None: `count` and `index` do."""
    return own if _size(accelerator) == 1 else None


def _own_axes(state: object) -> list[str]:
    """Return the axes of accelerate's parallelism along which processes read the same data."""
    config = getattr(state, "parallelism_config", None)
    names = [*config.non_dp_dim_names] if config is not None else []
    for own in (getattr(state, name, None) for name in ("device_mesh", "ds_device_mesh")):
        names += [name for name in own.mesh_dim_names if not name.startswith("dp")] if own is not None else []
    return list(dict.fromkeys(names))


def _size(accelerator: _Accelerator) -> int:
    size = 1 if _evaluating.get() else process.sizes().sp
    if size == 1:
        return 1
    if own := _own_axes(accelerator.state):
        axes = " and ".join(own)
        process.give_way(f"the script gives accelerate a ParallelismConfig of its own, with {axes}")
        return 1
    check_world(size, accelerator.num_processes)
    return size
