"""What torch's ``nn.LayerNorm`` computes: torch's own operator, which rounds once."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


def rounded_once(hidden_states: torch.Tensor, norm: nn.LayerNorm) -> torch.Tensor:
    """Return ``norm(hidden_states)`` without the call of the module; weight and bias may be None."""
    return functional.layer_norm(hidden_states, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
