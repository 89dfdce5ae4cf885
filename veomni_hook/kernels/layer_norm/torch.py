"""LayerNorm with torch's own operator, which computes in float32 and rounds once, for input of any dtype.

Two of upstream's formulas do the same step by step in float32. Gradients are those of the operator. Results
are as batch-invariant as the operator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch.nn import functional

from veomni_hook.kernels.layer_norm.operand_checks import unfit
from veomni_hook.kernels.shared.operand_checks import wants_grad

__all__ = ["refuses", "unweighted", "weight_before_cast"]


@cache
def refuses(variant: str) -> Callable[..., str | None]:
    """Return the rule of a variant: why a call must run the upstream code, or None."""

    def rule(owner: object, hidden_states: torch.Tensor, *operands: Any) -> str | None:
        reason = unfit(variant, hidden_states, operands)
        if reason is not None or variant == "unweighted":
            return reason
        weight = operands[0]
        if weight.ndim != 1:
            return "torch's operator takes one weight for all groups"
        if weight.dtype is not hidden_states.dtype:
            return f"the weight has dtype {weight.dtype}, the input {hidden_states.dtype}"
        # Of 8,192 rows in bfloat16, it is off by 8 % of its norm; the formula's by 0.2 %.
        if hidden_states.device.type == "cpu" and weight.dtype.itemsize == 2 and wants_grad(weight):
            return "on a CPU, torch's operator sums the weight's gradient in 16 bits"
        return None

    return rule


def weight_before_cast(hidden_states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return ``weight * xhat`` for ``hidden_states`` ``[..., hidden]`` and ``weight`` ``[hidden]``."""
    normalised = functional.layer_norm(hidden_states, weight.shape, weight, None, eps)
    # Autocast may run the operator in float32; upstream always casts back.
    return normalised.to(hidden_states.dtype)


def unweighted(hidden_states: torch.Tensor, normalized_shape: Sequence[int], eps: float) -> torch.Tensor:
    """Return ``xhat`` for ``hidden_states`` ``[..., hidden]``; ``normalized_shape`` is ``(hidden,)``."""
    normalised = functional.layer_norm(hidden_states, normalized_shape, None, None, eps)
    return normalised.to(hidden_states.dtype)
