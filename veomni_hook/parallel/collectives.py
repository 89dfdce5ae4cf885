"""Slices, gathers and all-to-alls over a sequence group, with their gradients.

One rule holds for all: the average of a parameter's gradients over all processes equals the gradient of one
process that computes everything. So a gather's gradient is the sum over the group (every process computes the
same head and loss), and the all-to-alls are permutations in both directions.

Positions are cut into equal parts. The last parts repeat the last position where the length is no multiple
of the group; a gather cuts these copies off, so no gradient reaches them.

The operators are those of torch's functional collectives, which dynamo and Inductor know.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from veomni_hook.kernels.shared.autograd import applied
from veomni_hook.parallel.groups import SequenceGroup

__all__ = [
    "all_summed",
    "each_to_heads",
    "gathered",
    "gathered_rows",
    "own_part",
    "part_length",
    "to_heads",
    "to_positions",
]

_OPS = torch.ops._c10d_functional


def part_length(length: int, group: SequenceGroup) -> int:
    """Return how many of ``length`` positions each process has, copies of the last one included.

    More than one exactly if ``length`` is: layers ask for that.
    """
    return max(-(-length // group.size), min(length, 2))


def own_part(x: torch.Tensor, dim: int, group: SequenceGroup) -> torch.Tensor:
    """Return this process's positions of ``x`` along ``dim``, in memory of their own."""
    length = x.shape[dim]
    part = part_length(length, group)
    start = group.rank * part
    inside = max(0, min(part, length - start))
    if inside == part:
        return x.narrow(dim, start, part).clone()
    last = x.narrow(dim, length - 1, 1)
    repeats = [part - inside if axis == dim % x.dim() else -1 for axis in range(x.dim())]
    pieces = [x.narrow(dim, start, inside)] if inside else []
    return torch.cat([*pieces, last.expand(repeats)], dim)


def gathered(x: torch.Tensor, dim: int, length: int, group: SequenceGroup) -> torch.Tensor:
    """Return the ``length`` positions of all processes along ``dim``; the gradient is summed."""
    whole: torch.Tensor = _gather(x.movedim(dim, 0), group)
    return whole[:length].movedim(0, dim).contiguous()


def gathered_rows(x: torch.Tensor, counts: Sequence[int], group: SequenceGroup) -> torch.Tensor:
    """Return the first ``counts[rank]`` rows of ``x`` ``[rows, width]`` of all processes.

    The gradient is summed. Each process sends as many rows as the one with most of them.
    """
    count, most = counts[group.rank], max(counts)
    own = torch.nn.functional.pad(x[:count], (0, 0, 0, most - count))
    whole: torch.Tensor = _gather(own, group)
    parts = [whole.narrow(0, rank * most, length) for rank, length in enumerate(counts)]
    return torch.cat(parts)


def all_summed(x: torch.Tensor, group: SequenceGroup) -> torch.Tensor:
    """Return the sum of ``x`` over the group; the gradient is summed as well."""
    summed: torch.Tensor = _sum(x, group)
    return summed


def to_heads(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group: SequenceGroup
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Exchange positions for heads: ``[batch, heads, part, width]`` to ``[batch, heads / size, all, width]``.

    The numbers of heads may differ, the group's size divides each. One exchange for all of one dtype.
    """
    query, key, value = each_to_heads((query, key, value), group)
    return query, key, value


def each_to_heads(tensors: Sequence[torch.Tensor], group: SequenceGroup) -> list[torch.Tensor]:
    """Exchange positions for heads of any number of tensors; see `to_heads`."""
    exchanged = list(tensors)
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        alike = [place for place, tensor in enumerate(tensors) if tensor.dtype == dtype]
        for place, heads in zip(alike, _exchanged([tensors[at] for at in alike], group), strict=True):
            exchanged[place] = heads
    return exchanged


def to_positions(x: torch.Tensor, group: SequenceGroup) -> torch.Tensor:
    """Exchange heads for positions, the reverse of `to_heads`.

    ``x`` is ``[batch, all, heads / size, width]``, the result ``[batch, part, heads, width]``.
    """
    send = _blocks(x.transpose(0, 1).contiguous(), 0, group)
    received: torch.Tensor = _exchange(send, group)
    return received.permute(2, 1, 0, 3, 4).flatten(2, 3)


def _exchanged(parts: list[torch.Tensor], group: SequenceGroup) -> list[torch.Tensor]:
    heads = [part.shape[1] // group.size for part in parts]
    widths = [part.shape[3] for part in parts]
    # [size, part, batch, heads, width]: what is sent to one process is one block, and what comes back lies in
    # the order of positions.
    blocks = [_blocks(part, 1, group).permute(1, 3, 0, 2, 4) for part in parts]
    if len(set(widths)) == 1:
        pieces = _pieces(_exchange(torch.cat(blocks, 3), group), heads)
    else:
        columns = [count * width for count, width in zip(heads, widths, strict=True)]
        received = _exchange(torch.cat([block.flatten(3) for block in blocks], 3), group)
        flat = zip(_pieces(received, columns), heads, widths, strict=True)
        pieces = [piece.reshape(*piece.shape[:2], count, width) for piece, count, width in flat]
    return [piece.permute(1, 2, 0, 3) for piece in pieces]


def _blocks(x: torch.Tensor, dim: int, group: SequenceGroup) -> torch.Tensor:
    """Return ``x`` with ``dim`` as two: a block for each process, and what is in it."""
    return x.reshape(*x.shape[:dim], group.size, x.shape[dim] // group.size, *x.shape[dim + 1 :])


def _pieces(received: torch.Tensor, counts: list[int]) -> list[torch.Tensor]:
    """Return pieces ``[positions, batch, count, ...]`` of ``[size, part, batch, sum(counts), ...]``."""
    flat = received.flatten(0, 1)
    # Not `split`: autograd lets nobody change one of several views in place.
    return [flat.narrow(2, sum(counts[:place]), count) for place, count in enumerate(counts)]


def _all_to_all(x: torch.Tensor, group: SequenceGroup) -> torch.Tensor:
    """Exchange the blocks of ``x`` ``[size, ...]``; contiguous."""
    sizes = [1] * group.size
    out: torch.Tensor = _OPS.wait_tensor(_OPS.all_to_all_single(x.contiguous(), sizes, sizes, group.name))
    return out


class _Context(Protocol):
    group: SequenceGroup


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, x: torch.Tensor, group: SequenceGroup) -> torch.Tensor:
        ctx.group = group
        return _all_to_all(x, group)

    @staticmethod
    def backward(ctx: _Context, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _exchange(grad, ctx.group), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, x: torch.Tensor, group: SequenceGroup) -> torch.Tensor:
        ctx.group = group
        whole: torch.Tensor = _OPS.wait_tensor(
            _OPS.all_gather_into_tensor(x.contiguous(), group.size, group.name)
        )
        return whole

    @staticmethod
    def backward(ctx: _Context, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _sum_of_parts(grad, ctx.group), None


class _SumOfParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, x: torch.Tensor, group: SequenceGroup) -> torch.Tensor:
        ctx.group = group
        part: torch.Tensor = _OPS.wait_tensor(
            _OPS.reduce_scatter_tensor(x.contiguous(), "sum", group.size, group.name)
        )
        return part

    @staticmethod
    def backward(ctx: _Context, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _gather(grad, ctx.group), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, x: torch.Tensor, group: SequenceGroup) -> torch.Tensor:
        ctx.group = group
        summed: torch.Tensor = _OPS.wait_tensor(_OPS.all_reduce(x.contiguous(), "sum", group.name))
        return summed

    @staticmethod
    def backward(ctx: _Context, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _sum(grad, ctx.group), None


_exchange, _gather = applied(_AllToAll), applied(_Gather)
_sum, _sum_of_parts = applied(_Sum), applied(_SumOfParts)
