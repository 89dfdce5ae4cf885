"""Attention whose keys go around a ring of processes: each has the queries of its own positions.

A process attends to the keys that it has, while it passes them on and gets those of the process before it.
Sums over the keys of each process are merged in float32. The backward pass goes around the ring again: the
gradients of keys travel with them. torch's own ring attention
(``torch.distributed.tensor.experimental``) takes no mask, so it knows neither windows nor packed or padded
samples; it also replaces attention of the whole process.

A step around the ring is an all-to-all with one block that is not empty: dynamo and Inductor know it, and it
runs beside what is computed until `_arrived` waits for it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

from veomni_hook.errors import ParallelError
from veomni_hook.kernels.shared.autograd import applied, is_recorded
from veomni_hook.parallel.groups import SequenceGroup, choices
from veomni_hook.parallel.partial_attention import Formula, Results, Sums, add_gradients, attend, empty, merge
from veomni_hook.parallel.ring_pairs import Pair, Pairs, hidden_by

__all__ = ["ring_attention"]

_OPS = torch.ops._c10d_functional
Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def ring_attention(  # noqa: PLR0913 - the operands
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    formula: Formula,
    ring: SequenceGroup,
    *,
    full: int,
    causal: bool,
) -> torch.Tensor:
    """Return attention of this process's queries to the keys of all, ``[batch, heads, queries, width]``.

    Args:
        query: ``[batch, heads, positions, width]``: this process's positions, as many as every other has.
        key: as the query, with as many heads or a divisor of them.
        value: as the key; its width may be another one.
        mask: of all ``full`` positions, ``[batch or 1, heads or 1, full or 1, full]``: booleans (true:
            visible), or numbers that are added to the scores; or None.
        sinks: ``[heads]``: one more score for each query, of a key without a value; or None.
        formula: what the scores are.
        ring: the processes, in the order of their positions.
        full: how many positions are no copies of the last one.
        causal: whether, without a mask, a position sees those up to itself only.
    """
    hidden = hidden_by(mask, ring.size, query.shape[2], causal=causal)
    pairs = Pairs(ring, query.shape[2], full, causal and mask is None, hidden)
    operands = [query, key, value]
    if pairs.balanced:
        operands = _mirrored(operands, ring)
    output: torch.Tensor = _attend(*operands, mask, sinks, formula, pairs)
    return _mirrored([output], ring)[0] if pairs.balanced else output


def _mirrored(tensors: Sequence[torch.Tensor], ring: SequenceGroup) -> list[torch.Tensor]:
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


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ring: SequenceGroup) -> torch.Tensor:
        ctx.ring = ring
        other = ring.size - 1 - ring.rank
        return _arrived(_sent(x, other, other, ring))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _swap(grad, ctx.ring), None


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0913, PLR0917 - the operands
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        sinks: torch.Tensor | None,
        formula: Formula,
        pairs: Pairs,
    ) -> torch.Tensor:
        with torch.autocast(query.device.type, enabled=False):
            sums = _around((query, key, value), mask, formula, pairs)
            if sinks is not None:  # one more score a head, of a key without a value
                scores = sinks.view(1, -1, 1, 1).to(sums.total).expand_as(sums.total)
                alone = Sums(scores, torch.ones_like(sums.total), torch.zeros_like(sums.output))
                merge(sums, (0, scores.shape[2]), alone)
            output = sums.output / torch.where(sums.total == 0, 1, sums.total)
            if output.dtype is not query.dtype:
                # Not otherwise: traced code of torch 2.11 returns every step, and loses the gradient of what
                # it returns twice, as the result of a cast to its own dtype.
                output = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, mask, sinks, output, sums.largest, sums.total)
        ctx.rest = formula, pairs
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, mask, sinks, output, largest, total = ctx.saved_tensors
        formula, pairs = ctx.rest
        if is_recorded():
            mesh = pairs.ring.mesh
            world, heads = mesh.size(), key.shape[1] * mesh.size(2)
            without_ring = choices(world, heads, int(os.environ.get("LOCAL_WORLD_SIZE", world)))
            raise ParallelError(
                "attention around a ring of processes has no derivative of its gradients",
                where="a backward pass with create_graph=True",
                fix=f"{without_ring}, or set VEOMNI_PARALLEL without sp",
            )
        with torch.autocast(query.device.type, enabled=False):
            grad = grad.to(largest.dtype)
            along = (grad * output).sum(-1, keepdim=True)
            of_sinks = None
            if sinks is not None:
                weights = torch.exp(sinks.view(1, -1, 1, 1).to(largest) - largest) / total
                of_sinks = -(weights * along).sum((0, 2, 3)).to(sinks.dtype)
            results = Results(largest, total, output, grad, along)
            of_query, of_key, of_value = _around_again((query, key, value), mask, results, formula, pairs)
        return of_query, of_key, of_value, None, of_sinks, None, None


_swap, _attend = applied(_Swap), applied(_Ring)


def _around(operands: Operands, mask: torch.Tensor | None, formula: Formula, pairs: Pairs) -> Sums:
    """Return the sums over the keys of all processes."""
    (query, key, value), ring = operands, pairs.ring
    sums, block = empty(query, value.shape[3]), torch.cat([key, value], 3)
    for step in range(ring.size):
        coming = _passed_on(block, ring) if step < ring.size - 1 else None
        for pair in pairs.after(step, mask):
            keys, values = _parts(block, pair, key.shape[3])
            merge(sums, pair.queries, attend(query.narrow(2, *pair.queries), keys, values, pair, formula))
        if coming is not None:
            block = _arrived(coming)
    return sums


def _around_again(
    operands: Operands, mask: torch.Tensor | None, results: Results, formula: Formula, pairs: Pairs
) -> Operands:
    """Return the gradients of query, key and value."""
    (query, key, value), ring = operands, pairs.ring
    of_query = torch.zeros_like(query, dtype=results.total.dtype)
    block = coming = torch.cat([key, value], 3)
    # Gradients of this process's keys: its own ones stay here, those of others arrive at the end.
    at_home = of_block = torch.zeros_like(block, dtype=results.total.dtype)
    for step in range(ring.size):
        block = _arrived(coming) if step else block
        # Both travel while this process computes.
        coming = _passed_on(block, ring) if step < ring.size - 1 else block
        others = _passed_on(of_block, ring) if step > 1 else None
        of_block = at_home if step == 0 else torch.zeros_like(at_home)
        for pair in pairs.after(step, mask):
            queries, of_queries = (x.narrow(2, *pair.queries) for x in (query, of_query))
            add_gradients(
                (queries, *_parts(block, pair, key.shape[3])),
                pair,
                formula,
                Results(*(x.narrow(2, *pair.queries) for x in results)),
                (of_queries, *_parts(of_block, pair, key.shape[3])),
            )
        if others is not None:
            of_block.add_(_arrived(others))
    at_home = at_home.add_(_arrived(_passed_on(of_block, ring)))
    of_key, of_value = at_home[..., : key.shape[3]], at_home[..., key.shape[3] :]
    return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype)


def _parts(block: torch.Tensor, pair: Pair, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the pair's keys and values in a block of both, with keys of ``width`` columns."""
    block = block.narrow(2, *pair.keys)
    return block[..., :width], block[..., width:]


def _passed_on(x: torch.Tensor, ring: SequenceGroup) -> torch.Tensor:
    """Begin to send ``x`` to the next process; return what `_arrived` makes the tensor of the one before."""
    return _sent(x, (ring.rank + 1) % ring.size, (ring.rank - 1) % ring.size, ring)


def _sent(x: torch.Tensor, to: int, source: int, ring: SequenceGroup) -> torch.Tensor:
    """Begin to send ``x`` to one process and to receive as much from one: ``[1, ...]``, which must wait."""
    sent, received = ([int(rank == other) for rank in range(ring.size)] for other in (to, source))
    out: torch.Tensor = _OPS.all_to_all_single(x.contiguous()[None], received, sent, ring.name)
    return out


def _arrived(x: torch.Tensor) -> torch.Tensor:
    """Wait for what another process has sent."""
    received: torch.Tensor = _OPS.wait_tensor(x)
    return received[0]
