"""Hyper-connections by definition: the oracle for tests, and what the idiom looks for.

``hidden_streams`` is ``[batch, length, N, D]``; ``norm`` is an RMSNorm without weight, of class
``norm_class``, whose ``eps`` kernels read. All weights are computed in float32. The idiom reads this file as
text: each body is the formula, step by step. Source: Xie et al., mHC: Manifold-Constrained Hyper-Connections.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional


def sinkhorn(
    hidden_streams: torch.Tensor,
    norm: Any,
    norm_class: object,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    streams: int,
    iterations: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return ``post``, ``comb`` and the collapsed streams of a hyper-connection.

    Args:
        hidden_streams: ``[batch, length, N, D]``.
        norm: what normalises the ``N * D`` values of a token.
        norm_class: its recognised class.
        fn: ``[(2 + N) * N, N * D]``, the projection.
        base: ``[(2 + N) * N]``, what is added to the scaled projection.
        scale: ``[3]``, of the weights of the sum, of the output and of the mixture.
        streams: N.
        iterations: how often columns are normalised; rows are once less.
        eps: added to weights and to sums that divide.

    Returns:
        ``post`` ``[batch, length, N]`` and ``comb`` ``[batch, length, N, N]`` in float32, and
        ``[batch, length, D]`` in the streams' dtype.
    """
    return _sinkhorn(
        hidden_streams, norm(hidden_streams.flatten(2).float()), fn, base, scale, streams, iterations, eps
    )


def sinkhorn__viewed(
    hidden_streams: torch.Tensor,
    norm: Any,
    norm_class: object,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    streams: int,
    iterations: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`sinkhorn` with a view in place of ``flatten``."""
    batch, length = hidden_streams.shape[:2]
    flat = hidden_streams.view(batch, length, -1).float()
    return _sinkhorn(hidden_streams, norm(flat), fn, base, scale, streams, iterations, eps)


def _sinkhorn(
    hidden_streams: torch.Tensor,
    normalised: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    streams: int,
    iterations: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    n = streams
    mixes = functional.linear(normalised, fn.float())
    pre_w, post_w, comb_w = mixes.split([n, n, n * n], dim=-1)  # type: ignore[no-untyped-call]
    pre_b, post_b, comb_b = base.split([n, n, n * n])  # type: ignore[no-untyped-call]
    pre_scale, post_scale, comb_scale = scale.unbind(0)
    pre = torch.sigmoid(pre_w * pre_scale + pre_b) + eps
    post = 2 * torch.sigmoid(post_w * post_scale + post_b)
    logits = comb_w.view(*comb_w.shape[:-1], n, n) * comb_scale + comb_b.view(n, n)
    comb = torch.softmax(logits, dim=-1) + eps
    comb = comb / (comb.sum(dim=-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(dim=-1, keepdim=True) + eps)
        comb = comb / (comb.sum(dim=-2, keepdim=True) + eps)
    collapsed = (pre.unsqueeze(-1) * hidden_streams).sum(dim=2).to(hidden_streams.dtype)
    return post, comb, collapsed


def collapse(
    hidden_streams: torch.Tensor,
    norm: Any,
    norm_class: object,
    fn: torch.nn.Parameter,
    base: torch.nn.Parameter,
    scale: torch.nn.Parameter,
    eps: float,
) -> torch.Tensor:
    """Return the weighted sum of the streams, ``[batch, length, D]``: what follows the last layer.

    ``fn`` is ``[N, N * D]``, ``base`` ``[N]`` and ``scale`` ``[1]``; the rest is as in `sinkhorn`.
    """
    flat = norm(hidden_streams.flatten(2).float())
    mixes = functional.linear(flat, fn.float())
    pre = torch.sigmoid(mixes * scale.float() + base.float()) + eps
    return (pre.unsqueeze(-1) * hidden_streams).sum(dim=2).to(hidden_streams.dtype)


def mix(
    post: torch.Tensor,
    comb: torch.Tensor,
    output: torch.Tensor,
    hidden_streams: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return the mixed streams plus the weighted output of a block, ``[batch, length, N, D]``.

    Args:
        post: ``[batch, length, N]``, weights of the output.
        comb: ``[batch, length, N, N]``; stream j is in the new stream k with weight ``comb[..., j, k]``.
        output: ``[batch, length, D]``.
        hidden_streams: ``[batch, length, N, D]``.
        dtype: what both weights are cast to.
    """
    return post.to(dtype).unsqueeze(-1) * output.unsqueeze(-2) + torch.matmul(
        comb.to(dtype).transpose(-1, -2), hidden_streams
    )
