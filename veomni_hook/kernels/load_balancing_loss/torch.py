"""The load-balancing loss in plain PyTorch, layer by layer, without synchronisation.

`veomni_hook.kernels.load_balancing_loss.triton` has the formulas. Chosen experts are counted without
``one_hot`` and deterministically.
"""

from __future__ import annotations

from functools import partial

import torch

from veomni_hook.kernels.load_balancing_loss.row_weights import balanced, loss_of

__all__ = ["loss", "softmax_topk", "softmax_topk_in_dtype"]


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


softmax_topk = partial(balanced, loss, False)
softmax_topk_in_dtype = partial(balanced, loss, True)
