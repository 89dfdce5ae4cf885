"""The load-balancing loss by definition: the oracles for tests and benchmarks."""

from __future__ import annotations

import torch
from torch.nn import functional

Logits = tuple[torch.Tensor, ...] | None


def softmax_topk(
    gate_logits: Logits,
    num_experts: int,
    top_k: int = 2,
    attention_mask: torch.Tensor | None = None,
) -> torch.Tensor | int:
    """Return ``num_experts * sum_e share_e * probability_e``, a float32 scalar; 0 without a tuple of logits.

    ``gate_logits`` holds ``[tokens, num_experts]`` for every layer, whose softmax stays in their dtype.
    ``attention_mask`` (``[batch, length]``, together as many as tokens) weighs the tokens of every layer.
    """
    if not isinstance(gate_logits, tuple):
        return 0
    device = gate_logits[0].device
    probabilities = torch.cat([torch.softmax(logits.to(device), dim=-1) for logits in gate_logits])
    if attention_mask is None:
        kept = torch.ones(len(probabilities), device=device)
    else:
        kept = attention_mask.reshape(-1).to(device, torch.float32).repeat(len(gate_logits))
    chosen = torch.zeros_like(probabilities, dtype=torch.float32)
    chosen = chosen.scatter(-1, torch.topk(probabilities, top_k, dim=-1).indices, 1.0)
    share = (chosen * kept[:, None]).sum(dim=0) / kept.sum()
    probability = (probabilities.float() * kept[:, None]).sum(dim=0) / kept.sum()
    return num_experts * torch.sum(share * probability)


def softmax_topk_in_dtype(
    gate_logits: Logits, num_experts: int, top_k: int = 2, attention_mask: torch.Tensor | None = None
) -> torch.Tensor | int:
    """Return the loss, with the mean probabilities in the dtype of the logits.

    The operands and the result are those of `softmax_topk`.
    """
    if gate_logits is None or not isinstance(gate_logits, tuple):
        return 0
    if isinstance(gate_logits, tuple):
        device = gate_logits[0].device
        logits = torch.cat([layer.to(device) for layer in gate_logits])
    probabilities = functional.softmax(logits, dim=-1)
    _, experts = probabilities.topk(top_k)
    chosen = functional.one_hot(experts, num_experts)
    if attention_mask is None:
        shares = chosen.float().mean(dim=0)
        means = probabilities.mean(dim=0)
    else:
        batch, length = attention_mask.shape
        layers = logits.shape[0] // (batch * length)
        mask = attention_mask[None, :, :, None, None].expand((layers, batch, length, top_k, num_experts))
        mask = mask.reshape(-1, top_k, num_experts).to(device)
        shares = (chosen.float() * mask).sum(dim=0) / mask.sum(dim=0)
        mask = attention_mask[None, :, :, None].expand((layers, batch, length, num_experts))
        mask = mask.reshape(-1, num_experts).to(device)
        means = (probabilities * mask).sum(dim=0) / mask.sum(dim=0)
    return torch.sum(shares * means.unsqueeze(0)) * num_experts
