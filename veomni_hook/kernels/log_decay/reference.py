"""The decay of linear attention by definition: the oracle for tests.

``log_decay = -exp(log_rate) * softplus(a + bias)`` (Yang, Kautz, Hatamizadeh, Gated Delta Networks, 2024,
after Mamba 2). Shapes: a, b ``[batch, positions, heads]`` of one dtype; log_rate, bias ``[heads]``.
"""

from __future__ import annotations

import torch
from torch.nn import functional

__all__ = ["softplus", "softplus_and_sigmoid"]


def softplus(a: torch.Tensor, log_rate: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return ``-exp(log_rate) * softplus(a + bias)`` in float32."""
    return -log_rate.float().exp() * functional.softplus(a.float() + bias)


def softplus_and_sigmoid(
    a: torch.Tensor, log_rate: torch.Tensor, bias: torch.Tensor, b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``sigmoid(b)`` in the dtype of ``b``, and `softplus`."""
    return b.sigmoid(), softplus(a, log_rate, bias)
