"""Decides whether the call of a norm after an addition may be skipped."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from veomni_hook.kernels.nn_layer_norm.skipped_calls import refuses_norm
from veomni_hook.kernels.selection.binding import wanted_by
from veomni_hook.kernels.selection.choice import AUTO
from veomni_hook.kernels.shared.operand_checks import not_plain, untraceable

__all__ = ["chosen_apart", "refuses"]


def chosen_apart(owner: Any, residual: torch.Tensor, hidden_states: torch.Tensor, norm: Any) -> str | None:
    """Return why ``auto`` leaves the norm to its own kernel (one was selected by name), or None."""
    chosen = wanted_by(owner, "nn_layer_norm") if isinstance(owner, nn.Module) else AUTO
    if chosen == AUTO:
        return None
    return f"nn_layer_norm={chosen} is chosen, and a fused kernel would bypass it"


def refuses(owner: Any, residual: torch.Tensor, hidden_states: torch.Tensor, norm: Any) -> str | None:
    """Return why this call must run the upstream code, or None.

    Args:
        owner: the module whose method adds and normalises.
        residual: an addend, or a tensor from which it is computed.
        hidden_states: the other addend, likewise.
        norm: what upstream calls with the sum.
    """
    reason = refuses_norm(norm)
    return reason if reason is not None else not_plain(residual, hidden_states) or untraceable()
