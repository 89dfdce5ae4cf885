"""The linear cross-entropy and the score of the last token by definition: the oracles for tests."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from veomni_hook.kernels.linear_cross_entropy.transform import IDENTITY, Transform

__all__ = ["last_token", "linear_cross_entropy"]


def linear_cross_entropy(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    *,
    ignore_index: int = -100,
    num_items: torch.Tensor | float | None = None,
    transform: Transform = IDENTITY,
) -> torch.Tensor:
    """Return the mean loss over positions that count, or their sum over ``num_items``; float32.

    ``hidden_states`` is ``[rows, hidden]``, ``weight`` ``[vocab, hidden]``, ``bias`` ``[vocab]``, ``target``
    ``[rows]`` (int64). ``transform`` is applied to logits.
    """
    logits = transform(functional.linear(hidden_states, weight, bias)).float()
    reduction = "mean" if num_items is None else "sum"
    loss = functional.cross_entropy(logits, target, ignore_index=ignore_index, reduction=reduction)
    if isinstance(num_items, torch.Tensor):
        num_items = num_items.to(loss.device)
    return loss if num_items is None else loss / num_items


def last_token(hidden_states: torch.Tensor, score: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return the scores ``[batch, length, labels]`` of all positions; the caller picks one of each row."""
    return score(hidden_states)
