"""Attention, plain, with sinks or a softcap, by definition: oracles for tests, the recogniser's patterns.

``query`` is ``[batch, heads, queries, head_dim]``; ``key`` and ``value`` have ``num_key_value_groups`` times
fewer heads. ``attention_mask`` is added to the scores: 0 where a query sees a key, the smallest number of its
dtype elsewhere. A sink is one more score for every query of a head, of a key without a value. Each function
returns ``[batch, queries, heads, head_dim]`` and the weights ``[batch, heads, queries, keys]``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

__all__ = ["plain", "sinks", "sinks_float32_softmax", "sinks_rescaled", "softcap"]

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
    """Return attention as torch's fused one computes it: no variant, for `veomni_hook.parallel.formulas`."""
    keys, values = _of_all_heads(key, module), _of_all_heads(value, module)
    scores = (query @ keys.transpose(2, 3)) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = functional.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = functional.dropout(weights, p=dropout, training=module.training)
    return (weights @ values).transpose(1, 2).contiguous(), weights


def sinks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    module: Any,
    scaling: float,
    dropout: float = 0.0,
) -> Result:
    """Return attention whose softmax has a sink, ``module.sinks [heads]``; all in the dtype of the scores."""
    keys, values = _of_all_heads(key, module), _of_all_heads(value, module)
    scores = (query @ keys.transpose(2, 3)) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    sink = module.sinks.reshape(1, -1, 1, 1).expand(query.shape[0], -1, query.shape[-2], -1)
    logits = torch.cat([scores, sink], dim=-1)
    logits = logits - logits.max(dim=-1, keepdim=True).values
    weights = functional.softmax(logits, dim=-1, dtype=logits.dtype)[..., :-1]
    weights = functional.dropout(weights, p=dropout, training=module.training).to(value.dtype)
    return (weights @ values).transpose(1, 2).contiguous(), weights


def sinks_float32_softmax(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    module: Any,
    scaling: float,
    dropout: float = 0.0,
) -> Result:
    """Return `sinks` with the softmax in float32."""
    keys, values = _of_all_heads(key, module), _of_all_heads(value, module)
    scores = (query @ keys.transpose(2, 3)) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    sink = module.sinks.reshape(1, -1, 1, 1).expand(query.shape[0], -1, query.shape[-2], -1)
    logits = torch.cat([scores, sink], dim=-1)
    logits = logits - logits.max(dim=-1, keepdim=True).values
    weights = functional.softmax(logits, dim=-1, dtype=torch.float32)[..., :-1]
    weights = functional.dropout(weights, p=dropout, training=module.training).to(value.dtype)
    return (weights @ values).transpose(1, 2).contiguous(), weights


def sinks_rescaled(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    module: Any,
    scaling: float,
    dropout: float = 0.0,
) -> Result:
    """Return `sinks` as attention without sinks, times ``sigmoid(logsumexp(scores) - sink)``."""
    keys, values = _of_all_heads(key, module), _of_all_heads(value, module)
    scores = (query @ keys.transpose(2, 3)) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    share = (torch.logsumexp(scores, dim=-1) - module.sinks.view(1, -1, 1)).to(torch.float32).sigmoid()
    weights = functional.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = functional.dropout(weights, p=dropout, training=module.training)
    output = weights @ values
    output = output * share.unsqueeze(-1).to(output.dtype)
    return output.transpose(1, 2).contiguous(), weights


def softcap(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    module: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
) -> Result:
    """Return attention with the scores ``softcap * tanh(scores / softcap)``; softmax in float32."""
    if scaling is None:
        scaling = module.head_dim**-0.5
    keys, values = _of_all_heads(key, module), _of_all_heads(value, module)
    scores = (query @ keys.transpose(2, 3)) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = functional.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = functional.dropout(weights, p=dropout, training=module.training)
    return (weights @ values).transpose(1, 2).contiguous(), weights


def _of_all_heads(states: torch.Tensor, module: Any) -> torch.Tensor:
    return _repeated(states, module.num_key_value_groups)


def _repeated(states: torch.Tensor, groups: int) -> torch.Tensor:
    batch, heads, length, width = states.shape
    if groups == 1:
        return states
    states = states[:, :, None, :, :].expand(batch, heads, groups, length, width)
    return states.reshape(batch, heads * groups, length, width)
