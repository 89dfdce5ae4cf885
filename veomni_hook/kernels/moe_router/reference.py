"""Routing by definition: the oracles for tests and benchmarks, and what the idiom looks for.

``router_logits`` is ``[tokens, num_experts]``; every function returns the weights and the indices of each
token's experts, both ``[tokens, top_k]``. ``sorted_`` is `torch.topk`'s ``sorted``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Routing = tuple[torch.Tensor, torch.Tensor]


def softmax_topk(router_logits: torch.Tensor, top_k: int, normalise: bool) -> Routing:
    """Return the ``top_k`` largest probabilities in float32, divided by their sum if ``normalise``."""
    probabilities = torch.softmax(router_logits, dim=-1, dtype=torch.float32)
    weights, indices = torch.topk(probabilities, top_k, dim=-1)
    if normalise:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights, indices


def topk_softmax(router_logits: torch.Tensor, top_k: int) -> Routing:
    """Return the softmax over the ``top_k`` largest logits, in their dtype."""
    largest, indices = torch.topk(router_logits, top_k, dim=-1)
    return torch.softmax(largest, dim=-1), indices


def biased_topk(
    router_logits: torch.Tensor,
    bias: torch.Tensor,
    top_k: int,
    score: Callable[[torch.Tensor], torch.Tensor],
    epsilon: float,
    sorted_: bool,
) -> Routing:
    """Return scores where ``scores + bias`` (``[num_experts]``) is largest, divided by their sum."""
    scores = score(router_logits)
    indices = torch.topk(scores + bias, top_k, dim=-1, sorted=sorted_)[1]
    weights = torch.gather(scores, -1, indices)
    return weights / (weights.sum(dim=-1, keepdim=True) + epsilon), indices


def grouped_topk(
    router_logits: torch.Tensor,
    bias: torch.Tensor,
    top_k: int,
    num_experts: int,
    num_group: int,
    topk_group: int,
    normalise: bool,
    fill: float,
    sorted_: bool,
) -> Routing:
    """Return sigmoid scores where ``scores + bias`` is largest within the ``topk_group`` best groups.

    A group is as good as its two best experts together; what is in no good group counts as ``fill``.
    """
    scores = torch.sigmoid(router_logits)
    biased = scores + bias
    of_groups = biased.view(-1, num_group, num_experts // num_group).topk(2, dim=-1)[0].sum(dim=-1)
    best = torch.topk(of_groups, topk_group, dim=-1, sorted=sorted_)[1]
    chosen = torch.zeros_like(of_groups).scatter_(1, best, 1)
    chosen = chosen.unsqueeze(-1).expand(-1, num_group, num_experts // num_group).reshape(-1, num_experts)
    allowed = biased.masked_fill(~chosen.bool(), fill)
    indices = torch.topk(allowed, top_k, dim=-1, sorted=sorted_)[1]
    weights = scores.gather(1, indices)
    if normalise:
        weights /= weights.sum(dim=-1, keepdim=True) + 1e-20
    return weights, indices
