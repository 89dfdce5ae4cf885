"""The linear cross-entropy by definition: the oracle for tests and benchmarks."""

from __future__ import annotations

import torch
from torch.nn import functional

__all__ = ["linear_cross_entropy"]


def linear_cross_entropy(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    *,
    ignore_index: int = -100,
    num_items: torch.Tensor | float | None = None,
) -> torch.Tensor:
    """Return the mean loss over positions that count, or their sum over ``num_items``; float32.

    ``hidden_states`` is ``[rows, hidden]``, ``weight`` ``[vocab, hidden]``, ``bias`` ``[vocab]``, ``target``
    ``[rows]`` (int64).
    """
    logits = functional.linear(hidden_states, weight, bias).float()
    losses = functional.cross_entropy(logits, target, ignore_index=ignore_index, reduction="none")
    return losses.sum() / ((target != ignore_index).sum() if num_items is None else num_items)
