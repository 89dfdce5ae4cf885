"""Tensors that go around a ring of processes, and the places that balance causal attention.

A step is an all-to-all with one block that is not empty: dynamo and Inductor know it, and it runs beside what
is computed until `arrived` waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from veomni_hook.kernels.shared.autograd import applied
from veomni_hook.parallel.groups import SequenceGroup

__all__ = ["arrived", "mirrored", "pass_on"]

_OPS = torch.ops._c10d_functional


def pass_on(x: torch.Tensor, ring: SequenceGroup) -> torch.Tensor:
    """Begin to send ``x`` to the next process; return what `arrived` makes the tensor of the one before."""
    return _sent(x, (ring.rank + 1) % ring.size, (ring.rank - 1) % ring.size, ring)


def arrived(x: torch.Tensor) -> torch.Tensor:
    """Return what `pass_on` receives."""
    received: torch.Tensor = _OPS.wait_tensor(x)
    return received[0]


def mirrored(tensors: Sequence[torch.Tensor], ring: SequenceGroup) -> list[torch.Tensor]:
    """Exchange the second half of the positions with the process that is as far from the ring's other end.

    Of halves that are numbered along the sequence, a process then has number ``i`` from the beginning and
    ``i`` from the end: with causal attention all have the same work, against each block of keys. Called
    again, it takes everything back.

    Args:
        tensors: ``[batch, heads, positions, width]``, of one dtype and as many positions.
        ring: the processes.
    """
    half = tensors[0].shape[2] // 2
    rows = [x[:, :, half:].movedim(2, 0) for x in tensors]
    received = _swap(torch.cat([row.flatten(1) for row in rows], 1), ring)
    halves, first = [], 0
    for row in rows:
        columns = row[0].numel()
        halves.append(received[:, first : first + columns].reshape(row.shape).movedim(0, 2))
        first += columns
    return [torch.cat([x[:, :, :half], other], 2) for x, other in zip(tensors, halves, strict=True)]


def _sent(x: torch.Tensor, to: int, source: int, ring: SequenceGroup) -> torch.Tensor:
    """Begin to send ``x`` to one process and to receive as much from one: ``[1, ...]``, which must wait."""
    sent, received = ([int(rank == other) for rank in range(ring.size)] for other in (to, source))
    out: torch.Tensor = _OPS.all_to_all_single(x.contiguous()[None], received, sent, ring.name)
    return out


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ring: SequenceGroup) -> torch.Tensor:
        ctx.ring = ring
        other = ring.size - 1 - ring.rank
        return arrived(_sent(x, other, other, ring))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _swap(grad, ctx.ring), None


_swap = applied(_Swap)
