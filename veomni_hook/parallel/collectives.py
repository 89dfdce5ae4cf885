"""Slices, gathers and all-to-alls over a sequence group, with their gradients.

One rule holds for all: the average of a parameter's gradients over all processes equals the gradient of one
process that computes everything. So a gather's gradient is the sum over the group (every process computes the
same head and loss), and the all-to-alls are permutations in both directions.

Positions are cut into equal parts. The last parts repeat the last position where the length is no multiple
of the group; a gather cuts these copies off, so no gradient reaches them.

The operators are those of torch's functional collectives, which dynamo and Inductor know. Outside of a
compiler, all-to-alls, of which a layer has several, are plain ones: they take the host less time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed
from torch.distributed import distributed_c10d

from veomni_hook.kernels.shared.autograd import applied, is_recorded
from veomni_hook.parallel.groups import SequenceGroup
from veomni_hook.parallel.peer_memory import mailbox, reachable

__all__ = [
    "all_averaged",
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
    whole: torch.Tensor = _gather(x, dim, length, group)
    return whole


def gathered_rows(x: torch.Tensor, counts: Sequence[int], group: SequenceGroup) -> torch.Tensor:
    """Return the first ``counts[rank]`` rows of ``x`` ``[rows, width]`` of all processes.

    The gradient is summed. Each process sends as many rows as the one with most of them.
    """
    count, most = counts[group.rank], max(counts)
    own = torch.nn.functional.pad(x[:count], (0, 0, 0, most - count))
    whole: torch.Tensor = _gather(own, 0, most * group.size, group)
    parts = [whole.narrow(0, rank * most, length) for rank, length in enumerate(counts)]
    return torch.cat(parts)


def all_averaged(x: torch.Tensor, group: SequenceGroup) -> torch.Tensor:
    """Return the average of ``x`` over the group; the gradient is averaged as well.

    That of a number is not: it is a loss, on which all processes go on alike.
    """
    averaged: torch.Tensor = _average(x, group)
    return averaged


def to_heads(tensors: Sequence[torch.Tensor], group: SequenceGroup) -> list[torch.Tensor]:
    """Exchange positions for heads: ``[batch, heads, part, width]`` to ``[batch, heads / size, all, width]``.

    The numbers of heads, widths and dtypes may differ, the group's size divides each number. The exchanges of
    the tensors overlap.
    """
    exchanged = _exchange(group, True, *(tensor.transpose(1, 2) for tensor in tensors))
    return [heads.transpose(1, 2) for heads in exchanged]


def to_positions(x: torch.Tensor, group: SequenceGroup) -> torch.Tensor:
    """Exchange heads for positions, the reverse of `to_heads`.

    ``x`` is ``[batch, all, heads / size, width]``, the result ``[batch, part, heads, width]``.
    """
    (positions,) = _exchange(group, False, x)
    return positions  # type: ignore[no-any-return]


def _heads_of(group: SequenceGroup, *positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Exchange ``[batch, part, heads, width]`` for ``[batch, all, heads / size, width]``.

    In this order in memory: implementations of attention copy to it what they have in another.
    """
    if (arrived := _through_peers(positions, 2, 1, group)) is not None:
        return tuple(x.flatten(1, 2) for x in arrived)
    blocks = []
    for x in positions:
        batch, part, heads, width = x.shape
        by_rank = x.reshape(batch, part, group.size, heads // group.size, width)
        blocks.append(_contiguous(by_rank.permute(2, 1, 0, 3, 4)))
    received = (x.flatten(0, 1).transpose(0, 1) for x in _exchanged(blocks, group))
    return tuple(_contiguous(x) for x in received)


def _positions_of(group: SequenceGroup, *heads: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Exchange ``[batch, all, heads / size, width]`` for ``[batch, part, heads, width]``."""
    if (arrived := _through_peers(heads, 1, 2, group)) is not None:
        return tuple(x.flatten(2, 3) for x in arrived)
    by_position = [_contiguous(x.transpose(0, 1)) for x in heads]
    blocks = [x.reshape(group.size, -1, *x.shape[1:]) for x in by_position]
    return tuple(
        _contiguous(received.permute(2, 1, 0, 3, 4)).flatten(2, 3) for received in _exchanged(blocks, group)
    )


def _through_peers(
    tensors: Sequence[torch.Tensor], cut: int, joined: int, group: SequenceGroup
) -> list[torch.Tensor] | None:
    """Send each process its part of dimension ``cut``; what comes is one more dimension, at ``joined``.

    None: nothing was sent, the processes do not share memory.
    """
    if not reachable(tensors[0].device):
        return None
    wide = [_wide(x if x.stride(-1) == 1 else x.contiguous()) for x in tensors]
    sources = [x.unflatten(cut, (group.size, -1)).movedim(cut, 0) for x in wide]  # type: ignore[no-untyped-call]
    if (peers := mailbox(group, sources)) is None:
        return None
    results = []
    for x in sources:
        shape = x.shape[1:]
        results.append(x.new_empty(*shape[:joined], group.size, *shape[joined:]))
    peers.exchange(sources, [y.movedim(joined, 0) for y in results])
    return [y.view(x.dtype) for x, y in zip(tensors, results, strict=True)]


def _gathered_through_peers(x: torch.Tensor, dim: int, group: SequenceGroup) -> torch.Tensor | None:
    """Return the positions of all processes of ``x [batch, part, width]``, or None.

    None: nothing was sent, the processes do not share memory, or ``dim`` is another one, or ``x``.
    """
    if x.dim() != 3 or dim != 1 or not reachable(x.device):
        return None
    part = _wide(x).unsqueeze(2)
    sources = [part.expand(group.size, *part.shape)]
    if (peers := mailbox(group, sources)) is None:
        return None
    whole = x.new_empty(x.shape[0], group.size * x.shape[1], x.shape[2])
    by_rank = whole.view(part.dtype).view(part.shape[0], group.size, *part.shape[1:])
    peers.exchange(sources, [by_rank.movedim(1, 0)])
    return whole


def _exchanged(tensors: list[torch.Tensor], group: SequenceGroup) -> list[torch.Tensor]:
    """Exchange the blocks of each ``[size, ...]``; all are on their way before the first is waited for."""
    if torch.compiler.is_compiling():
        sizes = [1] * group.size
        arriving = [_OPS.all_to_all_single(blocks, sizes, sizes, group.name) for blocks in tensors]
        return [_OPS.wait_tensor(blocks) for blocks in arriving]
    # The operators that a compiler knows take the host several times as long.
    received = [torch.empty_like(blocks) for blocks in tensors]
    process_group = distributed_c10d._resolve_process_group(group.name)  # type: ignore[arg-type, attr-defined]
    works = [
        distributed.all_to_all_single(out, blocks, group=process_group, async_op=True)
        for out, blocks in zip(received, tensors, strict=True)
    ]
    for work in works:
        work.wait()
    return received


def _contiguous(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` contiguous; not differentiable."""
    wide = x if x.is_contiguous() else _wide(x)
    if wide is x:
        return x.contiguous()
    y = x.new_empty(x.shape)
    _wide(y).copy_(wide)
    return y


def _wide(x: torch.Tensor) -> torch.Tensor:
    """Return the memory of ``x`` as elements of 8 bytes, if they are in it as they are in ``x``; else ``x``.

    torch copies a permuted tensor element by element: these take a fraction of the time.
    """
    step = 8 // x.itemsize
    if torch.compiler.is_compiling() or x.stride(-1) != 1:
        return x
    if any(number % step for number in (x.shape[-1], x.storage_offset(), *x.stride()[:-1])):
        return x
    return x.view(torch.int64)


class _Exchange(torch.autograd.Function):
    """Positions for heads (``to_heads``), or heads for positions: either is the gradient of the other."""

    @staticmethod
    def forward(
        ctx: Any,
        group: SequenceGroup,
        to_heads: bool,  # noqa: FBT001 - `apply` takes no keywords
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.group, ctx.to_heads = group, to_heads
        return (_heads_of if to_heads else _positions_of)(group, *tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if is_recorded():
            return None, None, *_exchange(ctx.group, not ctx.to_heads, *grads)
        # dynamo does not trace a function of several tensors within a backward pass.
        return None, None, *(_positions_of if ctx.to_heads else _heads_of)(ctx.group, *grads)


class _Gather(torch.autograd.Function):
    """``length`` positions along ``dim`` of what all processes have."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, length: int, group: SequenceGroup) -> torch.Tensor:
        ctx.group, ctx.dim, ctx.copies = group, dim, x.shape[dim] * group.size - length
        whole = _gathered_through_peers(x, dim, group)
        if whole is None:
            parts = _OPS.all_gather_into_tensor(_contiguous(x.movedim(dim, 0)), group.size, group.name)
            whole = _OPS.wait_tensor(parts)
            whole = _contiguous(whole[:length].movedim(0, dim)) if dim or ctx.copies else whole
        elif ctx.copies:
            whole = _contiguous(whole.narrow(dim, 0, length))
        # Nobody may change a view that such a function returns.
        return whole if torch.compiler.is_compiling() or whole._base is None else whole.data

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad = grad.movedim(ctx.dim, 0)
        if ctx.copies:  # no gradient reaches them
            grad = torch.cat([grad, grad.new_zeros(ctx.copies, *grad.shape[1:])])
        part = _sum_of_parts(grad, ctx.group)
        return part.movedim(0, ctx.dim), None, None, None


class _SumOfParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: SequenceGroup) -> torch.Tensor:
        ctx.group = group
        part: torch.Tensor = _OPS.wait_tensor(
            _OPS.reduce_scatter_tensor(_contiguous(x), "sum", group.size, group.name)
        )
        return part

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _gather(grad, 0, grad.shape[0] * ctx.group.size, ctx.group), None


class _Average(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: SequenceGroup) -> torch.Tensor:
        ctx.group = group
        # gloo has no average.
        summed: torch.Tensor = _OPS.wait_tensor(_OPS.all_reduce(x.contiguous(), "sum", group.name))
        return summed / group.size

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad if grad.dim() == 0 else _average(grad, ctx.group), None


_exchange = applied(_Exchange, 2)
_gather, _sum_of_parts, _average = applied(_Gather), applied(_SumOfParts), applied(_Average)
