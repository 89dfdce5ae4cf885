"""Which processes work on one sequence, and which share of the data each of them reads.

The world is ``(rest, sp)``: the ranks that share a sequence are neighbours, so they are on one host as long
as ``sp`` is at most the number of its devices. Every rank of such a group must get the same batches. Where
heads cannot be divided by ``sp``, or hosts share a sequence, the world is ``(rest, ring, heads)``.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from math import gcd
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from veomni_hook.errors import ParallelError
from veomni_hook.kernels.shared.traced_frame import answered_while_tracing
from veomni_hook.parallel import process

__all__ = [
    "SequenceGroup",
    "check_world",
    "choices",
    "data_shard",
    "device",
    "divided",
    "made_group",
    "neighbours",
    "over_hosts",
    "own_group",
    "sequence_group",
]


@dataclass(frozen=True)
class SequenceGroup:
    """The processes that share the sequences of this process.

    Attributes:
        rank: this process's place in the group, the order of its positions.
        size: how many processes there are.
        name: the group's name for functional collectives.
        mesh: the world as ``(rest, sp)``.
        host: the same processes, for numbers on the host; None in a part of a group.
        parts: what `divided` has made of it, by the number of neighbours.
    """

    rank: int
    size: int
    name: str
    mesh: DeviceMesh = field(compare=False, repr=False)
    host: distributed.ProcessGroup | None = field(default=None, compare=False, repr=False)
    parts: dict[int, tuple[SequenceGroup, SequenceGroup]] = field(
        default_factory=dict, compare=False, repr=False
    )


#: The world's process group and the sequence group made for it: a job may start anew in one process.
_made: tuple[object, SequenceGroup] | None = None
#: What `_beside` has made, for the world's group.
_BESIDE: WeakKeyDictionary[Any, dict[tuple[str, str | None], distributed.ProcessGroup]] = WeakKeyDictionary()


def sequence_group() -> SequenceGroup:
    """Return the group of this process; the first call creates it, in all processes of the world together.

    Raises:
        ParallelError: torch.distributed is not initialised, or the world cannot be divided.
    """
    global _made  # noqa: PLW0603
    size = process.sizes().sp
    if not process.is_joined():
        raise ParallelError(
            f"sp={size} splits sequences over {size} processes, but torch.distributed is not initialised",
            where=process.SETTING,
            fix=f"start the script with `torchrun --nproc_per_node N` (N: a multiple of {size}); a plain loop"
            " calls torch.distributed.init_process_group() before its first step",
        )
    if (known := made_group()) is not None:
        return known
    world = distributed.get_world_size()
    check_world(world)
    mesh = init_device_mesh(device(), (world // size, size), mesh_dim_names=("rest", "sp"))
    group = own_group(mesh.get_group("sp"))
    host = over_hosts(group, "to compare the batches of a sequence group")
    sequence = SequenceGroup(distributed.get_rank() % size, size, group.group_name, mesh, host)
    _made = distributed.group.WORLD, sequence
    return sequence


def own_group(group: distributed.ProcessGroup) -> distributed.ProcessGroup:
    """Return a group of the same processes that is not the world's; all of them must call.

    A mesh's group of all processes is the world's, on which FSDP gathers and reduces. A group does one thing
    after the other, so there an exchange would wait for these.
    """
    return _beside(group, None) if group is distributed.group.WORLD else group


def over_hosts(group: distributed.ProcessGroup, purpose: str) -> distributed.ProcessGroup:
    """Return a group of the same processes for numbers on the host; all of them must call.

    Raises:
        ParallelError: gloo cannot connect them; ``purpose`` is why it has to.
    """
    try:
        return group if device() == "cpu" else _beside(group, "gloo")
    except RuntimeError as error:
        raise ParallelError(
            f"gloo cannot connect processes, {purpose}: {error}",
            where=process.SETTING,
            fix="set GLOO_SOCKET_IFNAME to the network between the hosts, as NCCL_SOCKET_IFNAME",
        ) from error


def _beside(group: distributed.ProcessGroup, backend: str | None) -> distributed.ProcessGroup:
    """Return a second group of the same processes, on a backend (None: the world's), made once."""
    made = _BESIDE.setdefault(distributed.group.WORLD, {})
    key = group.group_name, backend
    if key not in made:
        options = getattr(group._get_backend(torch.device(device())), "options", None)
        made[key] = distributed.new_group(
            distributed.get_process_group_ranks(group),
            timeout=getattr(options, "_timeout", None),
            backend=backend,
            use_local_synchronization=True,
        )
    return made[key]


def made_group() -> SequenceGroup | None:
    """Return the group of this process if all processes have created it; else None, and nobody waits."""
    if _made is None or not process.is_joined():
        return None
    world, group = _made
    return group if world is distributed.group.WORLD and group.size == process.sizes().sp else None


def neighbours(size: int, heads: int, key_heads: int) -> int:
    """Return how many neighbours of ``size`` processes exchange positions for heads.

    As many as divide all heads, so none is repeated, and no more than a host has (``LOCAL_WORLD_SIZE``).
    """
    return gcd(size, heads, key_heads, int(os.environ.get("LOCAL_WORLD_SIZE", size)))


def divided(group: SequenceGroup, size: int) -> tuple[SequenceGroup, SequenceGroup]:
    """Return ``size`` neighbours of this process in the group, and the ring of those at its place elsewhere.

    The first call creates them, in all processes of the world together.
    """
    _divide(size)
    return group.parts[size]


@answered_while_tracing
def _divide(size: int) -> bool:
    group = sequence_group()
    if size not in group.parts:
        shape = (distributed.get_world_size() // group.size, group.size // size, size)
        mesh = init_device_mesh(device(), shape, mesh_dim_names=("rest", "ring", "heads"))
        heads, ring = (
            SequenceGroup(rank, length, mesh.get_group(name).group_name, mesh)
            for name, rank, length in (
                ("heads", group.rank % size, size),
                ("ring", group.rank // size, group.size // size),
            )
        )
        group.parts[size] = heads, ring
    return True


def data_shard() -> tuple[int, int]:
    """Return which share of the data this process reads: ``(index, count)``, for a sampler.

    ``DistributedSampler(dataset, num_replicas=count, rank=index)``: processes that share sequences have the
    same index. Before torch.distributed is initialised, rank and world are those that torchrun has set.

    Raises:
        ParallelError: ``sp`` does not divide the world.
    """
    size, world = process.sizes().sp, process.world_size()
    rank = distributed.get_rank() if process.is_joined() else int(os.environ.get("RANK", "0"))
    check_world(world)
    return rank // size, world // size


def check_world(world: int) -> None:
    """Raise unless ``sp`` divides the ``world`` processes of a job.

    Raises:
        ParallelError: it does not.
    """
    if world % (size := process.sizes().sp):
        raise ParallelError(
            f"sp={size} does not divide the {world} processes of this job",
            where=process.SETTING,
            fix=f"{choices(world)}, or start another number of processes",
        )


def choices(*counts: int) -> str:
    """Return the advice to choose an ``sp`` that divides each of ``counts``."""
    common = gcd(*counts)
    return f"choose sp from {', '.join(str(size) for size in range(1, common + 1) if common % size == 0)}"


def device() -> str:
    """Return the kind of device on which the world's collectives run."""
    backends = str(distributed.get_backend_config())
    for kind in ("cuda", "npu", "xpu"):
        if (
            kind in backends
            and getattr(torch, kind, None) is not None
            and getattr(torch, kind).is_available()
        ):
            return kind
    return "cpu"
