"""Rotary embedding by definition: the oracle for tests and benchmarks."""

from __future__ import annotations

import torch

__all__ = ["rotary"]


def rotary(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rotated ``query`` and ``key`` (``[batch, heads, length, head_dim]``) for the half-split layout.

    ``cos`` and ``sin`` are ``[batch or 1, length, head_dim]``.
    """
    cos, sin = cos[:, None], sin[:, None]
    return query * cos + _swap(query) * sin, key * cos + _swap(key) * sin


def _swap(x: torch.Tensor) -> torch.Tensor:
    first, second = x.tensor_split(2, dim=-1)
    return torch.cat((second.neg(), first), dim=-1)
