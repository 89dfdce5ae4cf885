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

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import distributed
from torch.distributed import distributed_c10d

from veomni_hook.kernels.shared.autograd import applied, is_recorded
from veomni_hook.parallel.groups import SequenceGroup

__all__ = [
    "all_averaged",
    "gathered",
    "gathered_rows",
    "own_part",
    "part_length",
    "positions_of",
    "shares_of_heads",
    "start_to_positions",
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
    positions = whole[:length].movedim(0, dim)
    return positions if positions.is_contiguous() else _laid_out(positions)


def gathered_rows(x: torch.Tensor, counts: Sequence[int], group: SequenceGroup) -> torch.Tensor:
    """Return the first ``counts[rank]`` rows of ``x`` ``[rows, width]`` of all processes.

    The gradient is summed. Each process sends as many rows as the one with most of them.
    """
    count, most = counts[group.rank], max(counts)
    own = torch.nn.functional.pad(x[:count], (0, 0, 0, most - count))
    whole: torch.Tensor = _gather(own, group)
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
    return next(shares_of_heads(tensors, group, 1))


def shares_of_heads(
    tensors: Sequence[torch.Tensor], group: SequenceGroup, count: int
) -> Iterator[list[torch.Tensor]]:
    """Yield what `to_heads` returns for each of ``count`` shares of the heads, in order.

    All shares are on their way before the first is waited for, and so are their gradients. The group divides
    each share among its processes.
    """
    trips = tuple(_Trip(group) for _ in range(count))
    arriving = _leave_positions(trips, *(tensor.transpose(1, 2) for tensor in tensors))
    for share, trip in enumerate(trips):
        heads = _reach_heads(trip, *arriving[share * len(tensors) : (share + 1) * len(tensors)])
        yield [x.transpose(1, 2) for x in heads]


def to_positions(x: torch.Tensor, group: SequenceGroup) -> torch.Tensor:
    """Exchange heads for positions, the reverse of `to_heads`.

    ``x`` is ``[batch, all, heads / size, width]``, the result ``[batch, part, heads, width]``.
    """
    return positions_of([start_to_positions(x, group)])


def start_to_positions(x: torch.Tensor, group: SequenceGroup) -> tuple[_Trip, torch.Tensor]:
    """Start `to_positions`, for a share of the heads; `positions_of` takes the results of all shares."""
    trip = _Trip(group)
    (arriving,) = _leave_heads(trip, x)
    return trip, arriving


def positions_of(shares: Sequence[tuple[_Trip, torch.Tensor]]) -> torch.Tensor:
    """Wait for what `start_to_positions` has started, and return ``[batch, part, heads, width]``."""
    trips, arriving = zip(*shares, strict=True)
    (positions,) = _reach_positions(trips, *arriving)
    return positions  # type: ignore[no-any-return]


class _Trip:
    """Tensors on their way between the processes of a group: forward, and later their gradients backward."""

    def __init__(self, group: SequenceGroup) -> None:
        self.group = group
        self.works: list[distributed.Work] = []

    def start(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Send the blocks of each ``[size, ...]``; return where those of the others arrive.

        Nobody reads these before `wait`, which compiled code does here.
        """
        group = self.group
        if torch.compiler.is_compiling():
            sizes = [1] * group.size
            arriving = [_OPS.all_to_all_single(blocks, sizes, sizes, group.name) for blocks in tensors]
            return [_OPS.wait_tensor(blocks) for blocks in arriving]
        # The operators that a compiler knows take the host several times as long.
        received = [torch.empty_like(blocks) for blocks in tensors]
        process_group = distributed_c10d._resolve_process_group(group.name)  # type: ignore[arg-type, attr-defined]
        self.works = [
            distributed.all_to_all_single(out, blocks, group=process_group, async_op=True)
            for out, blocks in zip(received, tensors, strict=True)
        ]
        if torch.is_anomaly_check_nan_enabled():
            self.wait()  # it reads what every function returns
        return received

    def wait(self) -> None:
        """Let this process's next kernels see what has arrived."""
        while self.works:
            self.works.pop().wait()


def _positions_leave(trips: Sequence[_Trip], *positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Start with ``[batch, part, heads, width]``; return ``[size, part, batch, heads, width]`` by trip."""
    arriving: list[torch.Tensor] = []
    size = trips[0].group.size
    for share, trip in enumerate(trips):
        blocks = []
        for x in positions:
            batch, part, heads, width = x.shape
            by_rank = x.reshape(batch, part, len(trips), size, heads // len(trips) // size, width)
            blocks.append(_contiguous(by_rank[:, :, share].permute(2, 1, 0, 3, 4)))
        arriving += trip.start(blocks)
    return tuple(arriving)


def _positions_arrive(trips: Sequence[_Trip], *arriving: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Wait for ``[size, part, batch, heads, width]`` by trip; return ``[batch, part, heads, width]``."""
    count = len(arriving) // len(trips)
    shapes = [x.permute(2, 1, 0, 3, 4).shape for x in arriving[:count]]
    results = [
        x.new_empty(*shape[:2], len(trips), *shape[2:]) for x, shape in zip(arriving, shapes, strict=False)
    ]
    for share, trip in enumerate(trips):
        trip.wait()
        for result, x in zip(results, arriving[share * count :], strict=False):
            _copy(result[:, :, share], x.permute(2, 1, 0, 3, 4))
    return tuple(result.flatten(2, 4) for result in results)


def _heads_leave(trip: _Trip, *heads: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Start with ``[batch, all, heads, width]``; return ``[size, part, batch, heads, width]``."""
    by_position = [_contiguous(x.transpose(0, 1)) for x in heads]
    return tuple(trip.start([x.reshape(trip.group.size, -1, *x.shape[1:]) for x in by_position]))


def _heads_arrive(trip: _Trip, *arriving: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Wait for ``[size, part, batch, heads, width]``; return ``[batch, all, heads, width]``."""
    trip.wait()
    # Contiguous, because implementations of attention copy to this order what they have in another.
    return tuple(_contiguous(x.flatten(0, 1).transpose(0, 1)) for x in arriving)


def _contiguous(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` contiguous; not differentiable."""
    return x if x.is_contiguous() else _copy(x.new_empty(x.shape), x)


def _copy(target: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Copy ``x`` into ``target``, and return it.

    torch copies a permuted tensor element by element: elements of 8 bytes take a fraction of the time.
    """
    if torch.compiler.is_compiling() or not (_has_words(target) and _has_words(x)):
        return target.copy_(x)
    target.view(torch.int64).copy_(x.view(torch.int64))
    return target


def _has_words(x: torch.Tensor) -> bool:
    """Return whether ``x`` can be seen as words of 8 bytes."""
    step = 8 // x.itemsize
    return x.stride(-1) == 1 and not any(
        number % step for number in (x.shape[-1], x.storage_offset(), *x.stride()[:-1])
    )


class _Context(Protocol):
    group: SequenceGroup


class _Trips(Protocol):
    trips: Sequence[_Trip]


class _OneTrip(Protocol):
    trip: _Trip


class _LeavePositions(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Trips, trips: Sequence[_Trip], *positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.trips = trips
        return _positions_leave(trips, *positions)

    @staticmethod
    def backward(ctx: _Trips, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *(_reach_positions if is_recorded() else _positions_arrive)(ctx.trips, *grads)


class _ReachPositions(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Trips, trips: Sequence[_Trip], *arriving: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.trips = trips
        return _positions_arrive(trips, *arriving)

    @staticmethod
    def backward(ctx: _Trips, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *(_leave_positions if is_recorded() else _positions_leave)(ctx.trips, *grads)


class _LeaveHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _OneTrip, trip: _Trip, *heads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.trip = trip
        return _heads_leave(trip, *heads)

    @staticmethod
    def backward(ctx: _OneTrip, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *(_reach_heads if is_recorded() else _heads_arrive)(ctx.trip, *grads)


class _ReachHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _OneTrip, trip: _Trip, *arriving: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.trip = trip
        return _heads_arrive(trip, *arriving)

    @staticmethod
    def backward(ctx: _OneTrip, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *(_leave_heads if is_recorded() else _heads_leave)(ctx.trip, *grads)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, x: torch.Tensor, group: SequenceGroup) -> torch.Tensor:
        ctx.group = group
        whole: torch.Tensor = _OPS.wait_tensor(
            _OPS.all_gather_into_tensor(_contiguous(x), group.size, group.name)
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
            _OPS.reduce_scatter_tensor(_contiguous(x), "sum", group.size, group.name)
        )
        return part

    @staticmethod
    def backward(ctx: _Context, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _gather(grad, ctx.group), None


class _Average(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, x: torch.Tensor, group: SequenceGroup) -> torch.Tensor:
        ctx.group = group
        # gloo has no average.
        summed: torch.Tensor = _OPS.wait_tensor(_OPS.all_reduce(x.contiguous(), "sum", group.name))
        return summed / group.size

    @staticmethod
    def backward(ctx: _Context, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad if grad.dim() == 0 else _average(grad, ctx.group), None


class _Contiguous(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return _contiguous(x)

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        return grad


_leave_positions, _reach_positions = applied(_LeavePositions, 1), applied(_ReachPositions, 1)
_leave_heads, _reach_heads = applied(_LeaveHeads, 1), applied(_ReachHeads, 1)
_gather, _laid_out = applied(_Gather), applied(_Contiguous)
_average, _sum_of_parts = applied(_Average), applied(_SumOfParts)
