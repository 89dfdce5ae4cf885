"""Which share of the data accelerate, Trainer and TRL give to this process, and which results count once.

Processes that share sequences read the same batches; what is gathered of them has each result ``sp`` times.
Without gradients nothing is shared, so the loaders that Trainer makes for evaluation divide their data among
all processes: its metrics count every example once.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any
from weakref import WeakSet

import torch
from torch import distributed
from torch.utils._pytree import tree_map_only

from veomni_hook.parallel import process
from veomni_hook.parallel.groups import check_world, sequence_group

__all__ = [
    "count",
    "dispatching",
    "index",
    "mesh",
    "of_first",
    "of_group",
    "once",
    "part_of",
    "prepared",
    "share",
    "shares",
]

_evaluating: ContextVar[bool] = ContextVar("veomni_evaluating", default=False)
#: Loaders that divide their data among all processes.
_DIVIDED: WeakSet[Any] = WeakSet()


def count(accelerator: Any) -> int:
    """Return how many shares of the data there are, for a loader that ``accelerator`` prepares.

    A script that has accelerate divide models or sequences in its own way gets that, and a warning.

    Raises:
        ParallelError: ``sp`` does not divide the world.
    """
    return int(accelerator.num_processes) // _size(accelerator)


def index(accelerator: Any) -> int:
    """Return which share this process reads; raises like `count`."""
    return int(accelerator.process_index) // _size(accelerator)


def prepared(accelerator: Any, loader: object, training: bool) -> object:  # noqa: FBT001 - as Trainer passes it
    """Return a loader of Trainer's, prepared by its accelerator."""
    token = _evaluating.set(not training)
    try:
        loader = accelerator.prepare(loader)
    finally:
        _evaluating.reset(token)
    if not training:
        _DIVIDED.add(loader)
    return loader


class _Shares:
    """What a loader that dispatches batches knows of the job: as many processes as there are shares.

    Process 0 alone reads, as always.
    """

    def __init__(self, state: Any, size: int) -> None:
        self.num_processes = state.num_processes // size
        self.share = state.process_index // size
        self._state = state

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)


def dispatching(state: Any) -> Any:
    """Return the state of the job for a new loader that dispatches batches."""
    size = 1 if _evaluating.get() else process.sizes().sp
    return state if size == 1 else _Shares(state, size)


def share(state: Any) -> int:
    """Return which share of a dispatched batch this process gets; ``state`` is that of `dispatching`."""
    own: int = state.share if isinstance(state, _Shares) else state.process_index
    return own


def once(gathered: Any, loader: object = None) -> Any:
    """Return tensors gathered from all processes along their first dimension, each group's results once.

    Args:
        gathered: tensors ``[processes * n, ...]``, in mappings and sequences.
        loader: the one that gives batches now, or None. Of Trainer's loaders for evaluation, nothing is left
            out.
    """
    size = _size_for(loader)
    if size == 1:
        return gathered
    world = distributed.get_world_size()

    def of_firsts(tensor: torch.Tensor) -> torch.Tensor:
        rows = tensor.reshape(world // size, size, tensor.shape[0] // world, *tensor.shape[1:])
        return rows[:, 0].flatten(0, 1)

    return tree_map_only(torch.Tensor, of_firsts, gathered)


def of_first(objects: Sequence[Any], loader: object = None) -> Sequence[Any]:
    """Return what this process adds to objects that are gathered: all, or nothing if another one adds them.

    ``loader`` is that of `once`.
    """
    size = _size_for(loader)
    return objects if size == 1 or distributed.get_rank() % size == 0 else []


def of_group(result: Any, loader: object = None) -> Any:
    """Return the ``result`` of the first process of this process's group, also in the others.

    All of the group go on with the first one's random numbers of the CPU. ``loader`` is that of `once`.
    """
    if _size_for(loader) == 1:
        return result
    group = sequence_group()
    values = [result, torch.get_rng_state()]
    distributed.broadcast_object_list(values, group=group.host, group_src=0)
    torch.set_rng_state(values[1])
    return values[0]


def part_of(place: int, length: int, loader: object = None) -> slice:
    """Return which part of what `once` returned belongs to process ``place``, of ``length`` results each.

    ``loader`` is that of `once`.
    """
    share = place // _size_for(loader)
    return slice(share * length, (share + 1) * length)


def shares(processes: int) -> int:
    """Return how many shares of the data ``processes`` read in training."""
    return processes // _size_for(None)


def _size_for(loader: object) -> int:
    """Return how many processes have the same batch, while ``loader`` gives batches."""
    return 1 if loader in _DIVIDED or not distributed.is_initialized() else process.sizes().sp


def mesh(accelerator: Any, own: object) -> object:
    """Return the mesh that divides a loader's data: ``own``, the script's; None: `count` and `index` do."""
    return own if _size(accelerator) == 1 else None


def _size(accelerator: Any) -> int:
    size = 1 if _evaluating.get() else process.sizes().sp
    if size == 1:
        return 1
    # The axes of accelerate's parallelism along which processes read the same data.
    config = getattr(accelerator.state, "parallelism_config", None)
    axes = [*config.non_dp_dim_names] if config is not None else []
    for own in (getattr(accelerator.state, name, None) for name in ("device_mesh", "ds_device_mesh")):
        axes += [name for name in own.mesh_dim_names if not name.startswith("dp")] if own is not None else []
    if axes:
        names = " and ".join(dict.fromkeys(axes))
        process.give_way(f"the script gives accelerate a ParallelismConfig of its own, with {names}")
        return 1
    check_world(accelerator.num_processes)
    return size
