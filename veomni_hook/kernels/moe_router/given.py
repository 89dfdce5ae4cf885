"""Weights of experts that are given: every variant's formula without its choice.

Each function takes the operands of its variant, and ``indices`` ``[..., top_k]``, int64: the experts of each
token, in the order of the weights that it returns with them. Weights are computed from the present logits, so
gradients flow. What only the choice reads (a bias, groups, a fill) has no effect.

With the indices that the variant itself chooses, the results are bitwise those of
`veomni_hook.kernels.moe_router.reference`. Mutates: nothing; no synchronisation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["biased_topk", "grouped_topk", "softmax_topk", "topk_softmax"]

Routing = tuple[torch.Tensor, torch.Tensor]


def softmax_topk(router_logits: torch.Tensor, top_k: int, normalise: bool, indices: torch.Tensor) -> Routing:
    """Return the probabilities of the given experts in float32, divided by their sum if ``normalise``."""
    weights = torch.softmax(router_logits, dim=-1, dtype=torch.float32).gather(-1, indices)
    if normalise:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights, indices


def topk_softmax(router_logits: torch.Tensor, top_k: int, indices: torch.Tensor) -> Routing:
    """Return the softmax over the logits of the given experts, in their dtype."""
    return torch.softmax(router_logits.gather(-1, indices), dim=-1), indices


def biased_topk(
    router_logits: torch.Tensor,
    bias: Any,
    top_k: int,
    score: Callable[[torch.Tensor], torch.Tensor],
    epsilon: float,
    sorted_: bool,
    indices: torch.Tensor,
) -> Routing:
    """Return the scores of the given experts, divided by their sum."""
    weights = score(router_logits).gather(-1, indices)
    return weights / (weights.sum(dim=-1, keepdim=True) + epsilon), indices


def grouped_topk(
    router_logits: torch.Tensor,
    bias: Any,
    top_k: int,
    num_experts: int,
    num_group: int,
    topk_group: int,
    normalise: bool,
    fill: float,
    sorted_: bool,
    indices: torch.Tensor,
) -> Routing:
    """Return the sigmoid scores of the given experts, divided by their sum if ``normalise``."""
    weights = torch.sigmoid(router_logits).gather(-1, indices)
    if normalise:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return weights, indices
