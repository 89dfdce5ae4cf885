"""What attention by segment computes, segment by segment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

__all__ = ["full"]


def full(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    attention: Callable[..., object],
    options: Mapping[str, Any],
) -> torch.Tensor:
    """Return softmax(scaling * q @ k^T) @ v, each segment for itself.

    Args:
        query: ``[1, heads, positions, head_dim]``.
        key: ``[1, key heads, positions, head_dim]``; a head serves consecutive heads of the query.
        value: ``[1, key heads, positions, value_dim]``.
        cu_seqlens: ``[segments + 1]``, integers: 0, then the end of each segment; the last is ``positions``.
        attention: the attention function that upstream calls for each segment; it is not called.
        options: the keyword arguments that upstream gives it. ``scaling`` counts; without it, or if it is
            None, it is ``head_dim ** -0.5``.

    Returns:
        ``[1, positions, heads, value_dim]``, in the dtype of ``query``.
    """
    scaling = options.get("scaling")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    groups = query.shape[1] // key.shape[1]
    outputs = []
    for start, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        q, k, v = (tensor[:, :, start:end] for tensor in (query, key, value))
        k, v = (tensor.repeat_interleave(groups, dim=1) for tensor in (k, v))
        scores = (q.float() @ k.float().transpose(2, 3)) * scaling
        outputs.append((scores.softmax(-1) @ v.float()).to(query.dtype).transpose(1, 2))
    return torch.cat(outputs, dim=1)
