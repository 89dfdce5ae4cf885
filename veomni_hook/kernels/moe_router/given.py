"""Weights of experts that are given: every variant's formula without its choice.

Each function takes the operands of its variant, and ``indices`` ``[..., top_k]``, int64: the experts of each
token, in the order of the weights that it returns with them. Weights are computed from the present logits, so
gradients flow. What only the choice reads (a bias, groups, a fill) has no effect.

With the indices that the variant itself chooses, the results are bitwise those of
`veomni_hook.kernels.moe_router.reference`. Mutates: nothing; no synchronisation.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from veomni_hook.kernels.moe_router import reference
from veomni_hook.kernels.moe_router.reference import read
from veomni_hook.kernels.moe_router.variants import LAYOUTS

__all__ = ["formula", "of", "scored", "softmax_topk", "topk_softmax"]

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


def scored(variant: str, *operands: object, indices: torch.Tensor) -> Routing:
    """Return the scores of the given experts, divided by their sum if the operands say so."""
    call = read(variant, operands)
    weights = call.score(call.router_logits).gather(-1, indices)
    if call.normalise:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + call.epsilon)
    return weights, indices


def of(variant: str) -> Callable[..., Routing]:
    """Return the function of a variant."""
    if variant in LAYOUTS:
        return partial(scored, variant)
    return softmax_topk if variant == "softmax_topk" else topk_softmax


def formula(variant: str, indices: torch.Tensor | None, *operands: object) -> Routing:
    """Compute a variant in plain torch, for given experts if there are ``indices``."""
    if indices is not None:
        return of(variant)(*operands, indices=indices)
    return reference.of(variant)(*operands)
