"""Attention to some of the keys: what is needed to merge it with attention to the others, and its gradients.

Sums are in float32, or float64. Where flash attention does not take a pair (`fused_pairs`), scores are, too,
and they are stored for a few queries at a time. Keys that several heads share are not repeated: the queries
of these heads are rows of one product.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from veomni_hook.parallel import fused_pairs
from veomni_hook.parallel.ring_pairs import Pair

__all__ = ["Formula", "Results", "Sums", "add_gradients", "attend", "empty", "is_fused", "merge"]

#: How many scores are stored at a time.
_SCORES = 2**26


class Formula(NamedTuple):
    """What the scores are: ``query @ key * scaling``, with a softcap ``softcap * tanh(that / softcap)``."""

    scaling: float
    softcap: float | None = None


class Sums(NamedTuple):
    """Softmax that is not divided yet.

    Attributes:
        largest: the largest score of each query, ``[batch, heads, queries, 1]``.
        total: the sum of ``exp(score - largest)``.
        output: the sum of ``exp(score - largest) * value``, ``[batch, heads, queries, width]``.
    """

    largest: torch.Tensor
    total: torch.Tensor
    output: torch.Tensor


class Results(NamedTuple):
    """What gradients need of queries, over the keys of all processes: ``[batch, heads, queries, ...]``.

    Attributes:
        largest: the largest score.
        total: the sum of ``exp(score - largest)``.
        output: the output.
        incoming: its gradient, in the dtype of sums.
        along: the sum of both, multiplied.
    """

    largest: torch.Tensor
    total: torch.Tensor
    output: torch.Tensor
    incoming: torch.Tensor
    along: torch.Tensor


def empty(query: torch.Tensor, width: int) -> Sums:
    """Return the sums over no key."""
    rows = (*query.shape[:3], 1)
    dtype = torch.promote_types(query.dtype, torch.float32)
    largest = query.new_full(rows, -torch.inf, dtype=dtype)
    return Sums(largest, torch.zeros_like(largest), query.new_zeros((*query.shape[:3], width), dtype=dtype))


def merge(sums: Sums, places: tuple[int, int], others: Sums) -> None:
    """Add sums over other keys to those of the queries at ``places``, in place."""
    old = Sums(*(x.narrow(2, *places) for x in sums))
    largest = torch.maximum(old.largest, others.largest)
    ours, theirs = (torch.exp(one.largest - _finite(largest)) for one in (old, others))
    old.total.mul_(ours).add_(others.total * theirs)
    old.output.mul_(ours).add_(others.output * theirs)
    old.largest.copy_(largest)


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, pair: Pair, formula: Formula) -> Sums:
    """Return the sums of a pair's queries over its keys.

    ``query`` is ``[batch, heads, queries, width]``; ``key`` and ``value`` may have fewer heads.
    """
    if is_fused(query, value, pair.mask, formula):
        output, logsumexp = fused_pairs.attend(query, key, value, formula.scaling, triangle=pair.triangle)
        logsumexp = logsumexp[..., None]
        return Sums(logsumexp, torch.ones_like(logsumexp), output.to(logsumexp.dtype))
    parts = []
    for rows, keys in _tiles(query, key, pair):
        scores, _ = _scores(query, key, pair, rows, keys, formula)
        largest = scores.amax(-1, keepdim=True)
        weights = torch.exp(scores - _finite(largest))
        parts.append(Sums(largest, weights.sum(-1, keepdim=True), _product(weights, value[:, :, :keys])))
    return Sums(*(torch.cat(part, 2) for part in zip(*parts, strict=True)))


def add_gradients(
    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    pair: Pair,
    formula: Formula,
    results: Results,
    gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """Add the gradients of a pair's queries, keys and values to ``gradients``, in place.

    Args:
        operands: query, key and value of the pair.
        pair: their places and mask.
        formula: what their scores are.
        results: those of these queries.
        gradients: of query, key and value, in the dtype of sums.
    """
    query, key, value = operands
    if is_fused(query, value, pair.mask, formula):
        computed = fused_pairs.gradients(
            results.incoming.to(query.dtype),
            *operands,
            results.output,
            (results.largest + results.total.log()).squeeze(3),
            formula.scaling,
            triangle=pair.triangle,
        )
        for gradient, addend in zip(gradients, computed, strict=True):
            gradient.add_(addend)
        return
    heads = key.shape[1]
    for rows, keys in _tiles(query, key, pair):
        scores, slope = _scores(query, key, pair, rows, keys, formula)
        largest, total, _, incoming, along = (x.narrow(2, *rows) for x in results)
        weights = torch.exp(scores - _finite(largest)) / torch.where(total == 0, 1, total)
        moved = weights * (_product(incoming, value[:, :, :keys].mT) - along)
        moved = (moved if slope is None else moved * slope) * formula.scaling
        gradients[0].narrow(2, *rows).add_(_product(moved, key[:, :, :keys]))
        gradients[1][:, :, :keys].add_(_grouped(moved, heads).mT @ _grouped(query.narrow(2, *rows), heads))
        gradients[2][:, :, :keys].add_(_grouped(weights, heads).mT @ _grouped(incoming, heads))


def is_fused(query: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, formula: Formula) -> bool:
    """Return whether flash attention computes pairs of such operands."""
    return mask is None and formula.softcap is None and fused_pairs.fits(query, value)


def _tiles(query: torch.Tensor, key: torch.Tensor, pair: Pair) -> Iterator[tuple[tuple[int, int], int]]:
    """Yield runs of queries, and how many of the keys, the first ones, they see at most."""
    batch, heads, queries, _ = query.shape
    step = max(1, _SCORES // (batch * heads * key.shape[2]))
    for first in range(0, queries, step):
        count = min(step, queries - first)
        yield (first, count), first + count if pair.triangle else key.shape[2]


def _scores(
    query: torch.Tensor, key: torch.Tensor, pair: Pair, rows: tuple[int, int], keys: int, formula: Formula
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the scores of some queries, and with a softcap what their gradient is times."""
    scores, slope = _product(query.narrow(2, *rows), key[:, :, :keys].mT) * formula.scaling, None
    if formula.softcap is not None:
        bent = torch.tanh(scores / formula.softcap)
        scores, slope = bent * formula.softcap, 1 - bent.square()
    if pair.triangle:
        places = torch.arange(keys, device=scores.device)
        return scores.masked_fill(places > places[rows[0] : sum(rows), None], -torch.inf), slope
    if pair.mask is None:
        return scores, slope
    mask = pair.mask if pair.mask.shape[2] == 1 else pair.mask.narrow(2, *rows)
    if mask.dtype is torch.bool:
        return scores.masked_fill(~mask, -torch.inf), slope
    return scores + mask, slope


def _product(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return ``x @ other``, where several heads of ``x`` may share one of ``other``."""
    flat = _grouped(x, other.shape[1]) @ other.to(torch.promote_types(x.dtype, torch.float32))
    return flat.reshape(*x.shape[:3], other.shape[3])


def _grouped(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Return the rows of heads that share one of ``heads`` as its rows: ``[batch, heads, rows, width]``."""
    return x.reshape(x.shape[0], heads, -1, x.shape[3]).to(torch.promote_types(x.dtype, torch.float32))


def _finite(largest: torch.Tensor) -> torch.Tensor:
    """Return the largest scores, 0 where a query sees no key: every weight is 0 there."""
    return torch.where(largest == -torch.inf, 0, largest)
