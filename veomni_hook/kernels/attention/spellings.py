"""Attention as torch's fused attention computes it, in the words of eager functions, for the recogniser.

No kernel is asked for these: `veomni_hook.parallel.formulas` reads whether a function computes this and
nothing else. They differ in the dtype of the softmax, in heads that share keys, and in the default scaling.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

__all__ = ["PLAIN", "plain", "plain_in_dtype", "unshared_in_dtype"]

#: The names of the functions.
PLAIN = ("plain", "plain_in_dtype", "unshared_in_dtype")
Result = tuple[torch.Tensor, torch.Tensor]


def plain(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    module: Any,
    scaling: float,
    dropout: float = 0.0,
) -> Result:
    """Return attention with keys that heads share; softmax in float32."""
    keys, values = _repeated(key, module.num_key_value_groups), _repeated(value, module.num_key_value_groups)
    scores = (query @ keys.transpose(2, 3)) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = functional.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = functional.dropout(weights, p=dropout, training=module.training)
    return (weights @ values).transpose(1, 2).contiguous(), weights


def plain_in_dtype(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    module: Any,
    scaling: float,
    dropout: float = 0.0,
) -> Result:
    """Return `plain` with the softmax in the dtype of the scores."""
    keys, values = _repeated(key, module.num_key_value_groups), _repeated(value, module.num_key_value_groups)
    scores = (query @ keys.transpose(2, 3)) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = functional.softmax(scores, dim=-1)
    weights = functional.dropout(weights, p=dropout, training=module.training)
    return (weights @ values).transpose(1, 2).contiguous(), weights


def unshared_in_dtype(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    module: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
) -> Result:
    """Return attention where each head has keys of its own; the scaling may follow from their width."""
    if scaling is None:
        scaling = query.size(-1) ** -0.5
    scores = (query @ key.transpose(2, 3)) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = functional.softmax(scores, dim=-1)
    weights = functional.dropout(weights, p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights


def _repeated(states: torch.Tensor, groups: int) -> torch.Tensor:
    batch, heads, length, width = states.shape
    if groups == 1:
        return states
    states = states[:, :, None, :, :].expand(batch, heads, groups, length, width)
    return states.reshape(batch, heads * groups, length, width)
