"""liger-kernel's fused addition and RMSNorm, only if selected by name."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch

from veomni_hook.kernels.add_rms_norm import reference
from veomni_hook.kernels.add_rms_norm.triton import unfit

__all__ = ["cast_before_weight", "one_plus_weight", "weight_before_cast"]

_Pair = tuple[torch.Tensor, torch.Tensor]

# The number that Liger adds to the weight, and its name for the casts.
_FORMS = {
    "cast_before_weight": (0.0, "llama"),
    "weight_before_cast": (0.0, "gemma"),
    "one_plus_weight": (1.0, "gemma"),
}


@cache
def _function() -> Any:
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

    return LigerFusedAddRMSNormFunction


def _added(
    variant: str, residual: torch.Tensor, hidden_states: torch.Tensor, weight: torch.Tensor, eps: float
) -> _Pair:
    """Return the sum and its ``variant`` as in `reference`."""
    if unfit(residual, hidden_states, weight, eps) is not None or weight.dtype is not residual.dtype:
        return getattr(reference, variant)(residual, hidden_states, weight, eps)  # type: ignore[no-any-return]
    # Last argument: not in place, because its backward would overwrite the incoming gradient.
    call = hidden_states, residual, weight, eps, *_FORMS[variant], False
    with torch.cuda.device(residual.device):  # it launches on the current device
        normalised, total = _function().apply(*call)
    return total, normalised


cast_before_weight = partial(_added, "cast_before_weight")
weight_before_cast = partial(_added, "weight_before_cast")
one_plus_weight = partial(_added, "one_plus_weight")
