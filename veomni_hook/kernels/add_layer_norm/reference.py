"""A residual addition and the LayerNorm of the sum by definition: the oracle."""

from __future__ import annotations

import torch
from torch import nn

from veomni_hook.kernels.nn_layer_norm import reference as norms


def rounded_once(
    residual: torch.Tensor, hidden_states: torch.Tensor, norm: nn.LayerNorm
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum and what ``norm`` makes of it."""
    total = residual + hidden_states
    return total, norms.rounded_once(total, norm)
