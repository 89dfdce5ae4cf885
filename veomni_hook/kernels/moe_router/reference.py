"""Routing by definition: the oracles for tests and benchmarks, and what the idiom looks for.

``router_logits`` is ``[tokens, num_experts]``; every function returns the weights and the indices of each
token's experts, both ``[tokens, top_k]``. ``sorted_`` is `torch.topk`'s ``sorted``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch

from veomni_hook.kernels.moe_router.variants import LAYOUTS, Layout

Routing = tuple[torch.Tensor, torch.Tensor]
Score = Callable[[torch.Tensor], torch.Tensor]


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


def scored(
    router_logits: torch.Tensor,
    bias: torch.Tensor,
    top_k: int,
    num_experts: int,
    num_group: int,
    topk_group: int,
    score: Score,
    normalise: bool,
    epsilon: float,
    fill: float,
    sorted_: bool,
    layout: Layout,
) -> Routing:
    """Return scores where ``scores + bias`` (``[num_experts]``) is largest, of a `Layout`.

    With groups, within the ``topk_group`` best ones: a group is as good as its two best experts together, and
    what is in no good group counts as ``fill``.
    """
    scores = score(router_logits) if layout.any_score else torch.sigmoid(router_logits)
    biased = scores + bias
    if layout.grouped:
        of_groups = biased.view(-1, num_group, num_experts // num_group).topk(2, dim=-1)[0].sum(dim=-1)
        best = torch.topk(of_groups, topk_group, dim=-1, sorted=sorted_)[1]
        chosen = torch.zeros_like(of_groups).scatter_(1, best, 1)
        chosen = chosen.unsqueeze(-1).expand(-1, num_group, num_experts // num_group)
        biased = biased.masked_fill(~chosen.reshape(-1, num_experts).bool(), fill)
    indices = torch.topk(biased, top_k, dim=-1, sorted=sorted_)[1]
    weights = scores.gather(-1, indices)
    if layout.always or normalise:
        total = weights.sum(dim=-1, keepdim=True) + (epsilon if layout.any_score else 1e-20)
        if layout.grouped:
            weights /= total  # in their dtype even if autocast sums in float32
        else:
            weights = weights / total
    return weights, indices


class Scored(NamedTuple):
    """The operands of `scored`, with what stands for those that a layout does not have."""

    router_logits: torch.Tensor
    bias: torch.Tensor
    top_k: int
    num_experts: int = 0
    num_group: int = 1
    topk_group: int = 1
    score: Score = torch.sigmoid
    normalise: bool = True
    epsilon: float = 1e-20
    fill: float = 0.0
    sorted_: bool = True


def read(variant: str, operands: tuple[Any, ...]) -> Scored:
    """Return the operands of a call by name."""
    return Scored(**dict(zip(LAYOUTS[variant].operands, operands, strict=True)))


@cache
def of(variant: str) -> Callable[..., Routing]:
    """Return the formula of a variant."""
    layout = LAYOUTS.get(variant)
    if layout is None:
        return softmax_topk if variant == "softmax_topk" else topk_softmax
    return lambda *operands: scored(*read(variant, operands), layout)
