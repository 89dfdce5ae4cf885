"""Two more ways to write ``softmax_topk``, for the recogniser to read.

They equal the reference up to rounding: the sums are made layer by layer, and the experts' shares are counted
by ``bincount`` or by ``histc``.
"""

from __future__ import annotations

import torch
from torch.nn import functional

__all__ = ["by_bincount", "by_histc"]

Logits = tuple[torch.Tensor, ...] | None


def by_bincount(
    gate_logits: Logits, num_experts: int, top_k: int = 2, attention_mask: torch.Tensor | None = None
) -> torch.Tensor | int:
    """Return the loss, from sums over the layers."""
    if gate_logits is None or not isinstance(gate_logits, tuple):
        return 0
    device = gate_logits[0].device
    counts = torch.zeros(num_experts, dtype=torch.float32, device=device)
    sums = torch.zeros(num_experts, dtype=torch.float32, device=device)
    rows: torch.Tensor | float = 0.0
    if attention_mask is not None:
        mask = attention_mask.reshape(-1).to(device=device, dtype=torch.float32)
    for layer in gate_logits:
        probabilities = functional.softmax(layer.to(device), dim=-1)
        _, experts = probabilities.topk(top_k)
        if attention_mask is None:
            counts = counts + torch.bincount(experts.reshape(-1), minlength=num_experts).float()
            sums = sums + probabilities.float().sum(dim=0)
            rows = rows + probabilities.shape[0]
        else:
            zeros = torch.zeros(num_experts, dtype=torch.float32, device=device)
            counts = counts + zeros.scatter_add(0, experts.reshape(-1), mask.repeat_interleave(top_k))
            sums = sums + (probabilities.float() * mask.unsqueeze(-1)).sum(dim=0)
            rows = rows + mask.sum()
    return torch.sum(counts / rows * (sums / rows).unsqueeze(0)) * num_experts


def by_histc(
    gate_logits: Logits, num_experts: int, top_k: int = 2, attention_mask: torch.Tensor | None = None
) -> torch.Tensor | int:
    """Return the loss, from sums over the layers; nothing waits for the device."""
    if gate_logits is None or not isinstance(gate_logits, tuple):
        return 0
    device = gate_logits[0].device
    number = torch.float32 if device.type in ("cpu", "mps") else torch.int32
    counts = torch.zeros(num_experts, dtype=torch.float32, device=device)
    sums = torch.zeros(num_experts, dtype=torch.float32, device=device)
    rows: torch.Tensor | float = 0.0
    if attention_mask is not None:
        mask = attention_mask.reshape(-1).to(device=device, dtype=torch.float32)
    for layer in gate_logits:
        probabilities = functional.softmax(layer.to(device), dim=-1)
        _, experts = probabilities.topk(top_k)
        if attention_mask is None:
            flat = experts.reshape(-1).to(number)
            counts = counts + torch.histc(flat, bins=num_experts, min=0, max=num_experts)
            sums = sums + probabilities.float().sum(dim=0)
            rows = rows + probabilities.shape[0]
        else:
            zeros = torch.zeros(num_experts, dtype=torch.float32, device=device)
            counts = counts + zeros.scatter_add(0, experts.reshape(-1), mask.repeat_interleave(top_k))
            sums = sums + (probabilities.float() * mask.unsqueeze(-1)).sum(dim=0)
            rows = rows + mask.sum()
    return torch.sum(counts / rows * (sums / rows).unsqueeze(0)) * num_experts
