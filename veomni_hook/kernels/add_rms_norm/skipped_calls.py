"""Decides whether the call of a norm may be skipped: only if it is known to do nothing but compute.

The slot has already checked that its class has the recognised forward (`veomni_hook.kernels.slot.skipped`).
"""

from __future__ import annotations

import torch
from torch import nn

from veomni_hook.kernels.selection.binding import wanted_by
from veomni_hook.kernels.selection.choice import AUTO
from veomni_hook.kernels.shared.module_calls import call_is_seen
from veomni_hook.kernels.shared.operand_checks import not_plain, untraceable

__all__ = ["chosen_apart", "refuses"]


def chosen_apart(
    owner: object, residual: torch.Tensor, hidden_states: torch.Tensor, norm: nn.Module, *_: object
) -> str | None:
    """Return why ``auto`` leaves the norm to its own kernel (one was selected by name), or None."""
    chosen = wanted_by(norm, "rms_norm") if isinstance(norm, nn.Module) else AUTO
    return None if chosen == AUTO else f"rms_norm={chosen} is chosen, and a fused kernel would bypass it"


def refuses(
    owner: object,
    residual: torch.Tensor,
    hidden_states: torch.Tensor,
    norm: nn.Module,
    norm_class: type[nn.Module],
) -> str | None:
    """Return why this call must run the upstream code, or None.

    Args:
        owner: the module whose ``forward`` contains the addition.
        residual: an addend, or a tensor from which it is computed.
        hidden_states: the other addend, likewise.
        norm: the module that upstream calls with the sum.
        norm_class: the class whose ``forward`` was recognised. A subclass or a wrapped module (FSDP2 changes
            the class of modules that it shards by themselves) may do more in a call.
    """
    if type(norm) is not norm_class:
        return f"the norm is a {type(norm).__module__}.{type(norm).__qualname__}, not the recognised class"
    if (seen := call_is_seen(norm)) is not None:
        return f"the norm {seen}, which a fused kernel would skip"
    return not_plain(residual, hidden_states) or untraceable()
