"""The load-balancing loss in plain PyTorch, layer by layer, without synchronisation.

`veomni_hook.kernels.load_balancing_loss.triton` has the formulas. Chosen experts are counted without
``one_hot`` and deterministically.
"""

from __future__ import annotations

import torch

from veomni_hook.kernels.load_balancing_loss.row_weights import (
    kept_rows,
    loss_of,
    middle_of,
)

__all__ = ["loss", "softmax_topk", "softmax_topk_in_dtype"]

Logits = tuple[torch.Tensor, ...]


def softmax_topk(
    gate_logits: Logits, num_experts: int, top_k: int = 2, attention_mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the loss, a float32 scalar; see `reference.softmax_topk` for the operands."""
    return _loss(gate_logits, top_k, attention_mask, None)


def softmax_topk_in_dtype(
    gate_logits: Logits, num_experts: int, top_k: int = 2, attention_mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the loss, with the mean probabilities in the dtype of the logits."""
    return _loss(gate_logits, top_k, attention_mask, middle_of(gate_logits[0], attention_mask))


def _loss(
    gate_logits: Logits, top_k: int, mask: torch.Tensor | None, low: torch.dtype | None
) -> torch.Tensor:
    kept = None if mask is None else kept_rows(mask, gate_logits[0])
    return loss(kept, top_k, middle_of(gate_logits[0]), low, *gate_logits)


def loss(
    kept: torch.Tensor | None,
    top_k: int,
    middle: torch.dtype,
    low: torch.dtype | None,
    *gate_logits: torch.Tensor,
) -> torch.Tensor:
    """Return the loss for weights of rows, probabilities in ``middle`` and means in ``low`` (`loss_of`)."""
    first = gate_logits[0]
    weights = torch.ones(first.shape[0], device=first.device) if kept is None else kept
    sums = []
    for logits in gate_logits:
        probabilities = torch.softmax(logits, dim=-1, dtype=middle)
        experts = probabilities.detach().topk(top_k, dim=-1).indices
        with torch.autocast(first.device.type, enabled=False):
            means = probabilities.float()
            means = means.sum(0) if kept is None else kept @ means
            sums.append(torch.stack((_counts(experts, weights, first.shape[1]), means)))
    return loss_of(torch.stack(sums).sum(0), kept, gate_logits, low)[0]


def _counts(experts: torch.Tensor, weights: torch.Tensor, number: int) -> torch.Tensor:
    """Return the weight of the rows that chose each of ``number`` experts."""
    if weights.device.type == "cpu":
        counts = weights.new_zeros(number)
        return counts.scatter_add_(0, experts.reshape(-1), weights.repeat_interleave(experts.shape[1]))
    # On other devices that sums in any order; a product does not.
    return weights @ weights.new_zeros(len(experts), number).scatter_(-1, experts, 1.0)
