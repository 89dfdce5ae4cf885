"""Index scores in PyTorch, on any device: upstream's formula for some queries at a time.

The tensor over heads, ``[batch, queries, heads, keys]`` in float32, has a limited size. If all of it is
within the limit, the bits of results and gradients are upstream's. Saved: the operands; each piece is
recomputed in the backward. A compiler gets the whole formula. Mutates: nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from veomni_hook.kernels.index_scores import reference
from veomni_hook.kernels.shared.recompute import computed_again

__all__ = ["LIMIT", "einsum", "relu_einsum", "relu_matmul", "relu_sum", "rows_of_a_piece"]

Tensor = torch.Tensor
_Formula = Callable[[Tensor, Tensor, Tensor, float], Tensor]
#: The bytes of a piece: enough work for a GPU, and little beside the scores of long sequences.
LIMIT = 1 << 28


def rows_of_a_piece(query: Tensor, key: Tensor) -> int:
    """Return how many queries of one sample are a piece, at least one.

    Args:
        query: ``[batch, queries, heads, width]``.
        key: ``[batch, keys, width]``.
    """
    return max(1, LIMIT // max(1, 4 * query.shape[2] * key.shape[1]))


def _in_pieces(formula: _Formula, query: Tensor, key: Tensor, weights: Tensor, scale: float) -> Tensor:
    """Return what ``formula``, one of `reference`, says."""
    batch, queries, heads, width = query.shape
    # With several samples, torch copies the keys for every query in front of the product.
    whole = 4 * batch * queries * key.shape[1] * (heads + (width if batch > 1 else 0))
    if torch.compiler.is_compiling() or whole <= LIMIT or weights.shape != query.shape[:3]:
        return computed_again(formula, query, key, weights, scale)
    size = rows_of_a_piece(query, key)
    samples = []
    # Keys in float32, so that their gradients are added up in float32, as by one product.
    for q, k, w in zip(*(torch.split(tensor, 1) for tensor in (query, key.float(), weights)), strict=True):
        rows = zip(torch.split(q, size, 1), torch.split(w, size, 1), strict=True)
        samples.append(torch.cat([computed_again(formula, q, k, w, scale) for q, w in rows], 1))
    return torch.cat(samples)


relu_matmul = partial(_in_pieces, reference.relu_matmul)
relu_sum = partial(_in_pieces, reference.relu_sum)
relu_einsum = partial(_in_pieces, reference.relu_einsum)
einsum = partial(_in_pieces, reference.einsum)
