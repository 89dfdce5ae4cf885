"""Liger's fused linear cross-entropy behind our call; runs only if selected by name.

It supports bias, soft cap, smoothing, z-loss and its own predictions; `unable` lists what it does not
support. If all positions are ignored it returns 0, and torch NaN. It synchronises to count the other rows.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch

from veomni_hook.errors import KernelError
from veomni_hook.kernels.linear_cross_entropy import causal_lm
from veomni_hook.kernels.linear_cross_entropy.head import last_linear
from veomni_hook.kernels.linear_cross_entropy.objective import Objective, TokenStatistics, Wanted
from veomni_hook.kernels.shared.autograd import differentiated_once
from veomni_hook.kernels.shared.operand_checks import wants_grad

__all__ = ["causal_lm_output", "loss_and_statistics", "refuses", "token_statistics", "unable"]


def loss_and_statistics(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    objective: Objective,
    wanted: Wanted,
) -> tuple[torch.Tensor, TokenStatistics]:
    """Return the loss and predictions; operands of `reference.loss_and_statistics`."""
    tensors = [tensor for tensor in (x, weight, bias) if tensor is not None]
    if not wants_grad(*tensors):  # else its forward computes unused gradients
        x, weight = x.detach(), weight.detach()
        bias = None if bias is None else bias.detach()
    # Function.apply takes no keywords. In order: class weights, ignored target, z-loss, smoothing, reduction,
    # cap, whether to return z-losses, the dtype of sums, token scaling, accuracy and predictions.
    outputs = _function().apply(
        x, weight, target, bias, None, objective.ignore_index, objective.z_loss, objective.label_smoothing,
        "mean" if objective.num_items is None else "sum", objective.transform.softcap, False,
        torch.float32 if objective.accumulate == "float32" else None, False, False, wanted.predictions,
    )  # fmt: skip
    loss, predictions = differentiated_once("linear_cross_entropy=liger", outputs[0]), outputs[3]
    num_items = objective.num_items
    if num_items is not None:
        loss = loss / (num_items.to(loss.device) if isinstance(num_items, torch.Tensor) else num_items)
    if predictions is not None:
        predictions = predictions.long().where(target != objective.ignore_index, objective.ignore_index)
    return loss, TokenStatistics(None, None, predictions)


@cache
def _function() -> Any:
    # Imported here, because `unable` and `refuses` have to work without liger_kernel.
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    return LigerFusedLinearCrossEntropyFunction


def token_statistics(*call: object) -> TokenStatistics:
    """Raise KernelError: Liger has no such function."""
    raise KernelError(
        "liger cannot compute log-probabilities of tokens",
        where="token_log_probs",
        fix="leave backend at None, or choose triton or torch",
    )


def unable(x: torch.Tensor, weight: torch.Tensor, objective: Objective, wanted: Wanted) -> str | None:
    """Return what Liger cannot compute here, or None."""
    if objective.loss_weights is not None or objective.distillation or wanted.distillation:
        return f"liger does not support {'a teacher' if objective.teacher else 'weights of tokens'}"
    if wanted.log_probs or wanted.entropy:
        return "liger cannot compute log-probabilities or entropies"
    if weight.requires_grad and not x.requires_grad:
        return "liger computes no gradient of the weight if the hidden states require none"
    if objective.transform.factor != 1:
        return "liger does not scale logits"
    if torch.is_autocast_enabled(x.device.type):
        return "liger computes in the dtype of its operands, and autocast is enabled"
    return None


def refuses(model: object, *operands: object) -> str | None:
    """Return why the upstream code must compute this loss, beside `causal_lm.refuses`, or None."""
    call = causal_lm.Call.of(model, *operands)
    weight = last_linear(model, call.head).weight
    return causal_lm.settled(model, unable(call.hidden_states, weight, *call.objective), *operands)


#: Returns a language model's loss, computed by Liger.
causal_lm_output = partial(causal_lm.fused_output, loss_and_statistics, token_statistics)
