"""Routing with ``npu_moe_gating_top_k_softmax``: the softmax of all logits, and its largest values.

Forward:  p = softmax(float32(x));  w, i = the top_k of p;  w / sum(w) if normalise, or for a softmax of the
top_k
Backward: dx_i = w (dw - sum(dw w)) of the chosen ones where w are divided by their sum, else
          dx = p (dw, at the chosen - sum(dw w)) of all
Shapes: x ``[tokens, num_experts]``, w and i ``[tokens, top_k]``. The operator is documented for inference
and has no backward. Saved: w and i, or i and x, from which p is recomputed. Mutates: nothing; no
synchronisation.

With ``indices`` (``[tokens, top_k]``, int64) the experts are given. The operator cannot take them, so torch
computes their weights (`veomni_hook.kernels.moe_router.given`), which may differ in the last bit of float32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from veomni_hook.kernels.moe_router import given, operand_checks
from veomni_hook.kernels.moe_router.operand_checks import is_count
from veomni_hook.kernels.shared import ascend
from veomni_hook.kernels.shared.autograd import gradients, is_recorded
from veomni_hook.kernels.shared.operators import operator

__all__ = ["refuses", "refuses_in_autocast", "softmax_topk", "topk_softmax"]

Routing = tuple[Tensor, Tensor]
# The operator's documented limit.
_MOST_TOP_K = 1024


@operator(
    lambda x, top_k: (x.new_empty((x.shape[0], top_k)), x.new_empty((x.shape[0], top_k), dtype=torch.int32))
)
def _npu_softmax_topk(x: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    weights, indices, _ = ascend.call("npu_moe_gating_top_k_softmax", x, None, top_k)
    return weights, indices


class _Router(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, top_k: int, normalise: bool) -> Routing:
        weights, indices = _npu_softmax_topk(x.float().contiguous(), top_k)
        indices = indices.long()
        if normalise:
            weights = weights / weights.sum(-1, keepdim=True)
        ctx.mark_non_differentiable(indices)
        ctx.normalise = normalise
        # Callers may write to the results, as to upstream's.
        ctx.save_for_backward(x, weights.clone() if normalise else None, indices)
        return weights, indices

    @staticmethod
    def backward(ctx: Any, dweights: Tensor, _: object) -> tuple[Tensor | None, ...]:
        x, weights, indices = ctx.saved_tensors
        if is_recorded():
            return (
                *gradients(
                    lambda x: given.softmax_topk(x, 0, ctx.normalise, indices)[:1], (x,), (True,), (dweights,)
                ),
                None,
                None,
            )
        dweights = dweights.float()
        if ctx.normalise:
            of_chosen = weights * (dweights - (dweights * weights).sum(-1, keepdim=True))
            dx = weights.new_zeros(x.shape).scatter_(-1, indices, of_chosen)
        else:
            p = torch.softmax(x, dim=-1, dtype=torch.float32)
            dx = torch.zeros_like(p).scatter_(-1, indices, dweights)
            dx = p * (dx - (dx * p).sum(-1, keepdim=True))
        return dx.to(x.dtype), None, None


def softmax_topk(
    router_logits: Tensor,
    top_k: int,
    normalise: bool,
    indices: Tensor | None = None,
) -> Routing:
    """Return the ``top_k`` largest probabilities in float32, divided by their sum if ``normalise``."""
    if indices is not None or not _fits(router_logits, top_k):
        return given.formula("softmax_topk", indices, router_logits, top_k, normalise)
    return _route(router_logits, top_k, bool(normalise))


def topk_softmax(router_logits: Tensor, top_k: int, indices: Tensor | None = None) -> Routing:
    """Return the softmax over the ``top_k`` largest logits, in their dtype."""
    if indices is not None or not _fits(router_logits, top_k):
        return given.formula("topk_softmax", indices, router_logits, top_k)
    weights, indices = _route(router_logits, top_k, True)
    return weights.to(router_logits.dtype), indices


def _route(*call: Any) -> Routing:
    return _Router.apply(*call)  # type: ignore[no-any-return, no-untyped-call]


def _fits(router_logits: Tensor, top_k: object) -> bool:
    """Whether the operator supports operands that a guard may not have passed to `refuses`."""
    return is_count(top_k, min(_MOST_TOP_K, router_logits.shape[1])) and router_logits.shape[0] > 0


def _refused(
    rule: Callable[..., str | None], owner: object, router_logits: Tensor, *others: object
) -> str | None:
    """Return why this call must run the upstream code, or None; ``rule``: of every kernel."""
    return rule(owner, router_logits, *others) or ascend.unfit(router_logits)


refuses = partial(_refused, operand_checks.refuses)
refuses_in_autocast = partial(_refused, operand_checks.refuses_in_autocast)
