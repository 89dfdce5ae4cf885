"""Shared by the router backends: the supported scores, and operand checks.

A guard asks with all operands. If the logits have no variable of their own, it asks only with a tensor from
which they are computed; the call then checks the other operands, and falls back to upstream's formula if a
kernel does not support them.
"""

from __future__ import annotations

import torch
from torch import nn

from veomni_hook.kernels.shared.activations import name_of
from veomni_hook.kernels.shared.module_calls import call_is_seen
from veomni_hook.kernels.shared.operand_checks import not_plain

__all__ = ["SIGMOID", "SOFTMAX", "SQRT_SOFTPLUS", "is_count", "refuses", "refuses_in_autocast", "score_of"]

#: The functions that weights are computed from. Except for the softmax, experts' scores are independent.
SOFTMAX, SIGMOID, SQRT_SOFTPLUS = 0, 1, 2


def score_of(score: object) -> int | None:
    """Return which score the function or module ``score`` computes: SIGMOID, SQRT_SOFTPLUS or None."""
    if isinstance(score, nn.Module):
        kind = type(score)
        if (kind.__module__, kind.__name__) == ("transformers.activations", "SqrtSoftplusActivation"):
            return SQRT_SOFTPLUS if call_is_seen(score) is None else None
    return SIGMOID if name_of(score) == "sigmoid" else None


def is_count(number: object, most: int) -> bool:
    """Whether ``number`` is an int from 1 to ``most``."""
    return type(number) is int and 0 < number <= most


def refuses(owner: object, router_logits: torch.Tensor, *operands: object) -> str | None:
    """Return why this call must run the upstream code, or None."""
    reason = not_plain(router_logits)
    if reason is not None:
        return reason
    if router_logits.layout is not torch.strided or router_logits.ndim != 2:
        return "the logits are not [tokens, num_experts]"
    if not router_logits.is_floating_point():
        return f"the logits have dtype {router_logits.dtype}"
    unknown = [operand for operand in operands if callable(operand) and score_of(operand) is None]
    return f"the score function {unknown[0]!r} is not supported" if unknown else None


def refuses_in_autocast(owner: object, router_logits: torch.Tensor, *operands: object) -> str | None:
    """`refuses`, and also rejects logits whose softmax or sum autocast computes in float32."""
    reason = refuses(owner, router_logits, *operands)
    if reason is not None:
        return reason
    if router_logits.dtype in (torch.float16, torch.bfloat16) and torch.is_autocast_enabled(
        router_logits.device.type
    ):
        return f"under autocast, upstream computes the weights of {router_logits.dtype} logits in float32"
    return None
