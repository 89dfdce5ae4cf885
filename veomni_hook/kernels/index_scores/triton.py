"""Index scores in Triton: a tile of queries and keys per program, which adds up the heads in registers.

Nothing of the size of all heads is written. `veomni_hook.kernels.index_scores.device` has the formula.
Products of two numbers in bfloat16 or float16 are exact in float32, and are added in float32: this is
upstream's precision, and only the order of sums differs. Operands in float32 are not rounded to TF32,
whatever torch's setting.

Shapes: query ``[batch, queries, heads, width]`` and key ``[batch, keys, width]`` in one dtype of float32,
bfloat16, float16, strided; weights ``[batch, queries, heads]`` in float32; width is at most 256. Saved: the
operands. Mutates: nothing. Deterministic. A score has the same bits in any batch: tiles do not depend on its
sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple

import torch

from veomni_hook.kernels.index_scores import device as kernels
from veomni_hook.kernels.index_scores import reference
from veomni_hook.kernels.index_scores.torch import rows_of_a_piece
from veomni_hook.kernels.shared.autograd import differentiable
from veomni_hook.kernels.shared.launch import LAUNCHES, Launch, cdiv, power, room
from veomni_hook.kernels.shared.operand_checks import DTYPES, not_plain
from veomni_hook.kernels.shared.operators import operator
from veomni_hook.kernels.shared.rows import dense_rows

__all__ = ["einsum", "refuses", "relu_einsum", "relu_matmul", "relu_sum"]

Tensor = torch.Tensor
# Columns of a product at least, by Triton, and at most, by shared memory.
_NARROWEST, _WIDEST = 16, 256


class _Tiles(NamedTuple):
    """A launch, and the queries and keys of its tiles."""

    launch: Launch
    queries: int
    keys: int


@lru_cache(maxsize=LAUNCHES)
def _tiles(
    device: torch.device, dtype: torch.dtype, heads: int, width: int, at: tuple[int, ...], *, relu: bool
) -> _Tiles:
    block = max(_NARROWEST, power(width))
    # A tile of keys and two of queries are in shared memory at a time.
    row = block * dtype.itemsize
    queries, keys = (64, 128) if row <= 256 else (32, 64)
    if (2 * queries + keys) * row > room(device)[1]:  # less than Hopper has
        keys //= 2
    constants = heads, width, block, relu, queries, keys
    return _Tiles(Launch(kernels.forward, 4, *constants, num_warps=4, num_stages=3), queries, keys)


def _empty(query: Tensor, key: Tensor, *_: object) -> Tensor:
    return query.new_empty((query.shape[0], query.shape[1], key.shape[1]), dtype=torch.float32)


@operator(_empty)
def _index_scores(query: Tensor, key: Tensor, weights: Tensor, scale: float, relu: bool) -> Tensor:
    query, key = dense_rows(query), dense_rows(key)
    batch, queries, heads, width = query.shape
    scores = _empty(query, key)
    if scores.numel():
        at = *query.stride()[:3], *key.stride()[:2], *weights.stride()
        tiles = _tiles(query.device, query.dtype, heads, width, at, relu=relu)
        blocks = cdiv(queries, tiles.queries)
        grid = batch * blocks * cdiv(key.shape[1], tiles.keys), 1, 1
        tiles.launch(grid, query, key, weights, scores, queries, key.shape[1], blocks, *at, scale)
    return scores


@operator(lambda dscores, *operands: tuple(tensor.new_empty(tensor.shape) for tensor in operands[:3]))
def _index_scores_backward(
    dscores: Tensor, query: Tensor, key: Tensor, weights: Tensor, scale: float, relu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients by torch's operators, for some queries at a time; scores are recomputed.

    dweights[s, h] = sum_t dscores[s, t] * relu(p),  p = scale * query[s, h] . key[t]
    dp = scale * dscores[s, t] * weights[s, h] where p > 0,  dquery = sum_t dp key,  dkey = sum_s,h dp query
    """
    dquery, dkey, dweights = (tensor.new_empty(tensor.shape) for tensor in (query, key, weights))
    size = rows_of_a_piece(query, key)
    with torch.autocast(query.device.type, enabled=False):
        for sample in range(len(query)):
            k = key[sample].float()
            dk = torch.zeros_like(k)
            for begin in range(0, query.shape[1], size):
                rows = slice(begin, begin + size)
                q, d = query[sample, rows].float(), dscores[sample, rows, None]
                p = torch.matmul(q, k.T).mul_(scale)
                if relu:
                    p.relu_()
                dweights[sample, rows] = torch.matmul(p, d.transpose(1, 2)).squeeze(2)
                dp = d * (scale * weights[sample, rows, :, None])
                if relu:
                    dp.masked_fill_(p <= 0, 0.0)
                dquery[sample, rows] = torch.matmul(dp, k)
                dk += torch.matmul(dp.flatten(0, 1).T, q.flatten(0, 1))
            dkey[sample] = dk
    return dquery, dkey, dweights


def _definition(query: Tensor, key: Tensor, weights: Tensor, scale: float, relu: bool) -> Tensor:
    return (reference.relu_einsum if relu else reference.einsum)(query, key, weights, scale)


_scores: Callable[..., Tensor] = differentiable(
    _index_scores,
    lambda saved, rest, wanted, dscores: _index_scores_backward(dscores, *saved, *rest),
    _definition,
    tensors=3,
)


def _computed(
    formula: Callable[..., Tensor], relu: bool, query: Tensor, key: Tensor, weights: Tensor, scale: float
) -> Tensor:
    """Return the scores ``[batch, queries, keys]`` of ``formula``, one of `reference`."""
    # The slot has not seen the weights.
    of_heads = not_plain(weights) is None and weights.shape == query.shape[:3]
    if not (of_heads and weights.dtype == torch.float32 and weights.device == query.device):
        return formula(query, key, weights, scale)
    return _scores(query, key, weights, float(scale), relu)


relu_matmul = partial(_computed, reference.relu_matmul, True)
relu_sum = partial(_computed, reference.relu_sum, True)
relu_einsum = partial(_computed, reference.relu_einsum, True)
einsum = partial(_computed, reference.einsum, False)


def refuses(owner: object, query: Tensor, key: Tensor, scale: float) -> str | None:
    """Return what the kernel refuses, beside `rules`, or None."""
    if query.dtype not in DTYPES or key.dtype != query.dtype:
        return f"the kernel does not support a query of {query.dtype} with a key of {key.dtype}"
    if query.shape[3] > _WIDEST:
        return f"heads are wider than {_WIDEST}"
    if torch.is_autocast_enabled(query.device.type):
        return "autocast is active, which casts products"
    return None if scale > 0 else "the scale is not positive"
