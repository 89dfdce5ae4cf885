"""Routing in plain PyTorch that saves nothing as large as the logits for backward, except the logits.

Upstream's autograd graph records the path from the logits to the choice, which has no gradient: probabilities
of all experts in float32, scores, scores with a bias, masks. Here the choice is made outside autograd, from
the logits themselves if a softmax does not change their order, and weights are computed only for the chosen
experts: ``[tokens, top_k]``. A softmax over all experts that is not normalised over the chosen ones needs all
probabilities in backward, and stays as in upstream: recomputing it cost a sixth more on a CPU (4096 x 128).

Indices are those of `torch.topk`; if logits differ but their float32 probabilities do not, the larger logit
is chosen. With ``normalise``, weights differ from upstream's in the last bit of float32: they are a softmax
of the chosen logits, not the quotient of two roundings. Autograd never saves the result itself, so callers
may write to weights, as in upstream. Mutates: nothing; no synchronisation.

With ``indices`` (``[tokens, top_k]``, int64) the experts are given, and nothing is chosen
(`veomni_hook.kernels.moe_router.given`): the indices that a call returned give its weights again, bitwise.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from veomni_hook.kernels.moe_router import given, reference
from veomni_hook.kernels.moe_router.operand_checks import refuses, score_of
from veomni_hook.kernels.moe_router.variants import LAYOUTS

__all__ = ["kernel", "refuses", "softmax_topk", "topk_softmax"]

Routing = tuple[torch.Tensor, torch.Tensor]


def topk_softmax(router_logits: torch.Tensor, top_k: int, indices: torch.Tensor | None = None) -> Routing:
    """Return the softmax over the ``top_k`` largest logits, in their dtype."""
    if indices is not None:
        return given.topk_softmax(router_logits, top_k, indices)
    return reference.topk_softmax(router_logits, top_k)


def softmax_topk(
    router_logits: torch.Tensor,
    top_k: int,
    normalise: bool,
    indices: torch.Tensor | None = None,
) -> Routing:
    """Return the ``top_k`` largest probabilities in float32, divided by their sum if ``normalise``."""
    if not normalise:
        if indices is not None:
            return given.softmax_topk(router_logits, top_k, normalise, indices)
        return reference.softmax_topk(router_logits, top_k, normalise)
    if indices is None:
        largest, indices = torch.topk(router_logits, top_k, dim=-1)
    else:
        largest = router_logits.gather(-1, indices)
    return torch.softmax(largest, dim=-1, dtype=torch.float32).clone(), indices


def kernel(variant: str) -> Callable[..., Routing]:
    """Return the kernel of a variant that chooses by scores and a bias."""
    return partial(_scored, variant)


def _scored(variant: str, *operands: object, indices: torch.Tensor | None = None) -> Routing:
    call, layout = reference.read(variant, operands), LAYOUTS[variant]
    if score_of(call.score) is None:
        # Such as a softmax: part of it is not the softmax of the part.
        return given.formula(variant, indices, *operands)
    if indices is None:
        chosen_by = call._replace(
            router_logits=call.router_logits.detach(), bias=_apart(call.bias), normalise=False
        )
        indices = reference.scored(*chosen_by, layout._replace(always=False))[1]
    weights = call.score(call.router_logits.gather(-1, indices))
    if not call.normalise:
        return weights.clone(), indices
    divided = weights / (weights.sum(dim=-1, keepdim=True) + call.epsilon)
    # With groups, in their dtype even if autocast sums in float32.
    return divided.to(weights.dtype) if layout.grouped else divided, indices


def _apart(bias: torch.Tensor) -> torch.Tensor:
    # Upstream may also add a plain number, which has no gradient.
    return bias.detach() if isinstance(bias, torch.Tensor) else bias
