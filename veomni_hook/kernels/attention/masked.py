"""Attention with a dense mask by definition: the oracle for tests of kernels that skip what a mask hides.

It is in a file of its own because the idiom of eager attention takes every function in `reference` as a
pattern, and this one is called by torch's name (`veomni_hook.patches.idioms.attention.window`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

__all__ = ["sliding_window"]


def sliding_window(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    module: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
) -> tuple[torch.Tensor, None]:
    """Return attention to the keys that the mask ``[batch, 1, queries, keys]`` (bool) shows.

    ``query`` is ``[batch, heads, queries, head_dim]``; the result ``[batch, queries, heads, head_dim]``.
    """
    groups = query.shape[1] // key.shape[1]
    keys, values = (tensor.repeat_interleave(groups, 1) for tensor in (key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = ((query @ keys.transpose(2, 3)) * scale).masked_fill(~attention_mask, -torch.inf)
    weights = functional.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = functional.dropout(weights, p=dropout, training=module.training)
    return (weights @ values).transpose(1, 2).contiguous(), None
