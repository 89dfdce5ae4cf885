"""RMSNorm with Liger's Triton kernels, only if selected by name.

Mutates: nothing; the incoming gradient is preserved (Liger's ``in_place=False``). Strided rows are copied.
"""

from __future__ import annotations

import torch
from liger_kernel.ops.rms_norm import LigerRMSNormFunction

__all__ = ["cast_before_weight", "one_plus_weight", "weight_before_cast"]


def cast_before_weight(hidden_states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return ``weight * xhat``, where ``xhat`` has the dtype of ``hidden_states`` ``[..., hidden]``."""
    return _norm(hidden_states, weight, eps, 0.0, "llama")


def weight_before_cast(hidden_states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return ``weight * xhat``, both in float32, in the dtype of ``hidden_states`` ``[..., hidden]``."""
    return _norm(hidden_states, weight, eps, 0.0, "gemma")


def one_plus_weight(hidden_states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return ``(1 + weight) * xhat`` in float32, in the dtype of ``hidden_states`` ``[..., hidden]``."""
    return _norm(hidden_states, weight, eps, 1.0, "gemma")


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float, casting: str) -> torch.Tensor:
    return LigerRMSNormFunction.apply(x, weight, eps, offset, casting, False)  # type: ignore[no-any-return]
