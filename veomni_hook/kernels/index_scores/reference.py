"""Scores of sparse attention by definition: the oracle for tests and the pattern for recognition.

``score[s, t] = sum_h weights[s, h] * relu(scale * query[s, h] . key[t])`` for a query s and a key t: the
lightning indexer (DeepSeek-AI, DeepSeek-V3.2, 2025, equation 1, which has the scale in the weights). The
names of variants say how upstream adds up the heads, which decides the last bits.

Shapes: query ``[batch, queries, heads, width]``, key ``[batch, keys, width]``, weights
``[batch, queries, heads]``; scale is a number. Returns ``[batch, queries, keys]``. Products are in float32.
"""

from __future__ import annotations

import torch
from torch.nn import functional

__all__ = ["einsum", "relu_einsum", "relu_matmul", "relu_matmul__unscaled", "relu_sum"]


def relu_matmul(query: torch.Tensor, key: torch.Tensor, weights: torch.Tensor, scale: float) -> torch.Tensor:
    """Add up the heads as a product of matrices."""
    scores = torch.matmul(query.float(), key.transpose(-1, -2).float().unsqueeze(1)) * scale
    return torch.matmul(weights.unsqueeze(-2), functional.relu(scores)).squeeze(-2)


def relu_matmul__unscaled(query: torch.Tensor, key: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The same where the scale is in the weights."""
    scores = torch.matmul(query.float(), key.transpose(-1, -2).float().unsqueeze(1))
    return torch.matmul(weights.unsqueeze(-2), functional.relu(scores)).squeeze(-2)


def relu_sum(query: torch.Tensor, key: torch.Tensor, weights: torch.Tensor, scale: float) -> torch.Tensor:
    """Add up weighted heads; scale after relu."""
    scores = torch.matmul(query.float(), key.transpose(-1, -2).float().unsqueeze(1))
    scores = functional.relu(scores) * scale
    return (scores * weights.unsqueeze(-1)).sum(dim=2)


def relu_einsum(query: torch.Tensor, key: torch.Tensor, weights: torch.Tensor, scale: float) -> torch.Tensor:
    """Both products as einsum."""
    scores = functional.relu(torch.einsum("bshd,btd->bsht", query.float(), key.float()) * scale)
    return torch.einsum("bsht,bsh->bst", scores, weights)


def einsum(query: torch.Tensor, key: torch.Tensor, weights: torch.Tensor, scale: float) -> torch.Tensor:
    """The same without relu."""
    scores = torch.einsum("bshd,btd->bsht", query.float(), key.float()) * scale
    return torch.einsum("bsht,bsh->bst", scores, weights)
