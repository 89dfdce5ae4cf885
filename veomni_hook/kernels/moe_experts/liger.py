"""Experts with Liger's Triton kernels, only if selected by name: SiLU, gate_up [E, 2I, H].

Liger reads its number of tiles from the device and sums the gradient of the routing weights with atomics, so
that gradient is not deterministic: its last bits vary between runs. Saved: the operands, gate and up of all
pairs, and the order of pairs. Mutates: nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

from veomni_hook.kernels.moe_experts import forms
from veomni_hook.kernels.shared.activations import name_of
from veomni_hook.kernels.shared.autograd import differentiated_once
from veomni_hook.kernels.shared.operand_checks import DTYPES

__all__ = ["gated", "refuses"]


def gated(
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    gate_up_proj: torch.Tensor,
    down_proj: torch.Tensor,
    act_fn: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Compute `reference.gated` with SiLU."""
    # Liger does not support ids without an expert: they go to the first one, with weight 0.
    there = (top_k_index >= 0) & (top_k_index < gate_up_proj.shape[0])
    index = torch.where(there, top_k_index, 0).to(torch.int32)
    weights = torch.where(there, top_k_weights, 0)
    output: torch.Tensor = LigerFusedMoEFunction.apply(hidden_states, gate_up_proj, down_proj, index, weights)
    return differentiated_once("moe_experts=liger", output)


def refuses(owner: object, *operands: Any) -> str | None:
    """Return why the upstream code of the experts ``owner`` must run, or None."""
    reason = forms.refuses(owner, *operands)
    if reason is not None:
        return reason
    x, stacked, activation = operands[0], operands[3], operands[5]
    if name_of(activation) != "silu":
        return f"the activation {name_of(activation)} is not supported"
    if x.dtype not in DTYPES or stacked.dtype is not x.dtype or torch.is_autocast_enabled(x.device.type):
        return f"hidden states have dtype {x.dtype}, weights {stacked.dtype}, or autocast is on"
    return None if operands[1].numel() and stacked.numel() else "there are no expert ids or no weights"
