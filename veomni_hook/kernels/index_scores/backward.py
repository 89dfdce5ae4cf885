"""Gradients of index scores by torch's operators, for some queries at a time; scores are recomputed.

dweights[s, h] = sum_t dscores[s, t] * relu(p),  p = scale * query[s, h] . key[t]
dp = scale * dscores[s, t] * weights[s, h] where p > 0,  dquery = sum_t dp key,  dkey = sum_s,h dp query
"""

from __future__ import annotations

import torch

from veomni_hook.kernels.index_scores.torch import rows_of_a_piece

__all__ = ["gradients"]

Tensor = torch.Tensor


def gradients(
    dscores: Tensor,
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    scale: float,
    relu: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and weights.

    Args:
        dscores: ``[batch, queries, keys]`` in float32.
        query: ``[batch, queries, heads, width]``.
        key: ``[batch, keys, width]``.
        weights: ``[batch, queries, heads]`` in float32.
        scale: of the products.
        relu: whether products below zero count as zero.
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
