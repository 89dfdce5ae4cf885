"""Attention whose keys go around a ring of processes: each has the queries of its own positions.

A process attends to the keys that it has, while it passes them on and gets those of the process before it.
Sums over the keys of each process are merged in float32. The backward pass goes around the ring again: the
gradients of keys travel with them. torch's own ring attention
(``torch.distributed.tensor.experimental``) takes no mask, so it knows neither windows nor packed or padded
samples; it also replaces attention of the whole process.
"""

from __future__ import annotations

from typing import Any

import torch

from veomni_hook.errors import ParallelError
from veomni_hook.kernels.shared.autograd import applied, is_recorded
from veomni_hook.parallel.groups import SequenceGroup
from veomni_hook.parallel.partial_attention import Formula, Sums, add_gradients, attend, empty, merge
from veomni_hook.parallel.ring import arrived, mirrored, pass_on
from veomni_hook.parallel.ring_pairs import Pairs

__all__ = ["ring_attention"]


def ring_attention(
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
    pairs = Pairs(ring.size, query.shape[2], full, mask, causal)
    operands = [query, key, value]
    if pairs.balanced:
        operands = mirrored(operands, ring)
    output: torch.Tensor = _attend(*operands, mask, sinks, formula, ring, full, causal)
    return mirrored([output], ring)[0] if pairs.balanced else output


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
        ring: SequenceGroup,
        full: int,
        causal: bool,  # noqa: FBT001 - autograd passes positions
    ) -> torch.Tensor:
        pairs = Pairs(ring.size, query.shape[2], full, mask, causal)
        with torch.autocast(query.device.type, enabled=False):
            sums = _around(query, key, value, pairs, formula, ring)
            if sinks is not None:
                _add_sinks(sums, sinks)
            output = (sums.output / torch.where(sums.total == 0, 1, sums.total)).to(query.dtype)
        ctx.save_for_backward(query, key, value, mask, sinks, output, sums.largest, sums.total)
        ctx.rest = formula, ring, full, causal
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, mask, sinks, output, largest, total = ctx.saved_tensors
        formula, ring, full, causal = ctx.rest
        if is_recorded():
            raise ParallelError(
                "attention around a ring of processes has no derivative of its gradients",
                where="a backward pass with create_graph=True",
                fix="set VEOMNI_PARALLEL with an sp that divides the key heads, or without sp",
            )
        pairs = Pairs(ring.size, query.shape[2], full, mask, causal)
        with torch.autocast(query.device.type, enabled=False):
            grad = grad.to(largest.dtype)
            along = (grad * output).sum(-1, keepdim=True)
            of_sinks = None
            if sinks is not None:
                weights = torch.exp(sinks.view(1, -1, 1, 1).to(largest) - largest) / total
                of_sinks = -(weights * along).sum((0, 2, 3)).to(sinks.dtype)
            results = largest, total, grad, along
            of_query, of_key, of_value = _around_again((query, key, value), results, pairs, formula, ring)
        return of_query, of_key, of_value, None, of_sinks, None, None, None, None


_attend = applied(_Ring)


def _around(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pairs: Pairs,
    formula: Formula,
    ring: SequenceGroup,
) -> Sums:
    """Return the sums over the keys of all processes."""
    sums = empty(query, value.shape[3])
    block = torch.cat([key, value], 3)
    for step in range(ring.size):
        coming = pass_on(block, ring) if step < ring.size - 1 else None
        key, value = block.split([key.shape[3], value.shape[3]], 3)
        for pair in pairs.of(ring.rank, (ring.rank - step) % ring.size):
            keys, values = (x.narrow(2, *pair.keys) for x in (key, value))
            merge(sums, pair.queries, attend(query.narrow(2, *pair.queries), keys, values, pair, formula))
        if coming is not None:
            block = arrived(coming)
    return sums


def _around_again(
    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    results: tuple[torch.Tensor, ...],
    pairs: Pairs,
    formula: Formula,
    ring: SequenceGroup,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of query, key and value; ``results`` as in `add_gradients`."""
    query, key, value = operands
    widths = [key.shape[3], value.shape[3]]
    of_query = torch.zeros_like(query, dtype=results[0].dtype)
    block, travelling = torch.cat([key, value], 3), None
    for step in range(ring.size):
        coming = pass_on(block, ring) if step < ring.size - 1 else None
        own = torch.zeros_like(block, dtype=results[0].dtype)
        for pair in pairs.of(ring.rank, (ring.rank - step) % ring.size):
            of_pair = [x.narrow(2, *pair.keys) for x in (*block.split(widths, 3), *own.split(widths, 3))]
            queries = [x.narrow(2, *pair.queries) for x in (query, of_query, *results)]
            add_gradients(
                (queries[0], of_pair[0], of_pair[1]),
                pair,
                formula,
                (queries[2], queries[3], queries[4], queries[5]),
                (queries[1], of_pair[2], of_pair[3]),
            )
        # What others have added to the gradients of this block came while this process computed.
        travelling = pass_on(own if travelling is None else own + arrived(travelling), ring)
        if coming is not None:
            block = arrived(coming)
    of_key, of_value = arrived(travelling).split(widths, 3)
    return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype)


def _add_sinks(sums: Sums, sinks: torch.Tensor) -> None:
    """Add one more score a head, of a key without a value."""
    scores = sinks.view(1, -1, 1, 1).to(sums.total).expand_as(sums.total)
    ones = torch.ones_like(sums.total)
    merge(sums, (0, scores.shape[2]), Sums(scores, ones, torch.zeros_like(sums.output)))
