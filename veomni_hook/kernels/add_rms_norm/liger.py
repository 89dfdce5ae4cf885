"""liger-kernel's fused addition and RMSNorm, only if selected by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

from veomni_hook.kernels.add_rms_norm import reference
from veomni_hook.kernels.add_rms_norm.triton import unfit
from veomni_hook.kernels.add_rms_norm.variants import OP
from veomni_hook.kernels.rms_norm.variants import Norm
from veomni_hook.kernels.shared.autograd import differentiated_once

__all__ = ["kernel"]

_Pair = tuple[torch.Tensor, torch.Tensor]

#: What Liger adds to the weight, by the factor of a variant, and its names for the casts.
_OFFSETS = {"weight": 0.0, "one_plus": 1.0}
_CASTING = {"x": "llama", "float32": "gemma"}


@cache
def _function() -> Any:
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

    return LigerFusedAddRMSNormFunction


def _added(
    formula: Callable[..., _Pair],
    norm: Norm,
    residual: torch.Tensor,
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
) -> _Pair:
    """Return the sum and what ``norm`` makes of it; ``formula`` computes unsupported operands."""
    if unfit(residual, hidden_states, weight, eps) is not None or weight.dtype is not residual.dtype:
        return formula(residual, hidden_states, weight, eps)
    # Last argument: not in place, because its backward would overwrite the incoming gradient.
    call = hidden_states, residual, weight, eps, _OFFSETS[norm.factor], _CASTING[norm.rounded_to], False
    with torch.cuda.device(residual.device):  # it launches on the current device
        normalised, total = _function().apply(*call)
    kernel = "add_rms_norm=liger"
    return differentiated_once(kernel, total), differentiated_once(kernel, normalised)


@cache
def kernel(variant: str) -> Callable[..., _Pair]:
    """Return the function that adds and normalises as ``variant``."""
    return partial(_added, reference.of(variant), OP.variants[variant].form)
