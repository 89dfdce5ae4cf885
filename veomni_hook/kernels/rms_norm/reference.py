"""RMSNorm by definition: the oracle for tests and benchmarks."""

from __future__ import annotations

import torch

__all__ = ["rms_norm"]


def rms_norm(hidden_states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return ``weight * xhat``: ``xhat`` is computed in float32 and cast to the input's dtype first.

    ``hidden_states`` is ``[..., hidden]``, ``weight`` ``[hidden]``; the result has their promoted dtype.
    """
    x32 = hidden_states.float()
    scale = torch.rsqrt(x32.square().mean(dim=-1, keepdim=True) + eps)
    return weight * (x32 * scale).to(hidden_states.dtype)
