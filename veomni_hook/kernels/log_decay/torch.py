"""Decays in PyTorch, on any device: the formula, recomputed in the backward; only operands are saved."""

from __future__ import annotations

import torch

from veomni_hook.kernels.log_decay import reference
from veomni_hook.kernels.shared.recompute import computed_again, recomputed

__all__ = ["channels", "channels_rounded_rate", "softplus", "softplus_and_sigmoid"]


def softplus_and_sigmoid(
    a: torch.Tensor, log_rate: torch.Tensor, bias: torch.Tensor, b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``sigmoid(b)`` in the dtype of ``b``, and `softplus`."""
    return b.sigmoid(), computed_again(reference.softplus, a, log_rate, bias)


softplus = recomputed("veomni_hook.kernels.log_decay.reference:softplus")
channels = recomputed("veomni_hook.kernels.log_decay.reference:channels")
channels_rounded_rate = recomputed("veomni_hook.kernels.log_decay.reference:channels_rounded_rate")
