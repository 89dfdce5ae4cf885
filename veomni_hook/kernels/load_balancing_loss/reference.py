"""The load-balancing loss by definition: the oracle for tests and benchmarks."""

from __future__ import annotations

import torch

__all__ = ["softmax_topk"]


def softmax_topk(
    gate_logits: tuple[torch.Tensor, ...] | None,
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
