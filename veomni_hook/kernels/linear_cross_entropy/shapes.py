"""What the operators of the Triton kernels return, without values: what a tracer computes with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["of_gradients", "of_loss", "of_statistics", "row_results"]


def row_results(x: Tensor, *, entropy: bool, predictions: bool) -> tuple[Tensor, ...]:
    """Allocate the optional statistics of rows."""
    rows = x.shape[0]
    entropies = x.new_empty(rows if entropy else 0, dtype=torch.float32)
    return entropies, x.new_empty(rows if predictions else 0, dtype=torch.int64)


def of_gradients(x: Tensor, weight: Tensor, result: torch.dtype, needed: list[bool]) -> tuple[Tensor, ...]:
    """Of x, weight and bias; empty where not needed."""
    to_x, to_weight, to_bias = needed
    return (
        x.new_empty(x.shape if to_x else 0),
        weight.new_empty(weight.shape, dtype=result) if to_weight else x.new_empty(0),
        x.new_empty(weight.shape[0], dtype=torch.float32) if to_bias else x.new_empty(0),
    )


def of_loss(x: Tensor, weight: Tensor, *call: Any) -> tuple[Tensor, ...]:
    """Of the loss: itself, the factor of its gradients, these, and statistics."""
    *_, entropy, predictions, _, result, needed = call
    gradients = of_gradients(x, weight, result, needed)
    num_items = call[2]
    loss = x.new_empty(() if num_items is None else num_items.shape, dtype=torch.float32)
    log_probs = x.new_empty(x.shape[0], dtype=torch.float32)
    inverse = x.new_empty((), dtype=torch.float32)
    return loss, inverse, *gradients, log_probs, *row_results(x, entropy=entropy, predictions=predictions)


def of_statistics(x: Tensor, weight: Tensor, *call: Any) -> tuple[Tensor, ...]:
    """Of statistics: these, logsumexp, and log-probabilities of chosen tokens."""
    *_, ids, _, _, _, entropy, predictions = call
    log_probs, lse = (x.new_empty(x.shape[0], dtype=torch.float32) for _ in range(2))
    at = lse.new_empty(0 if ids is None else ids.shape)
    return log_probs, *row_results(x, entropy=entropy, predictions=predictions), lse, at
