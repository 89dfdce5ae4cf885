"""LayerNorm by definition, one function for each formula: the oracle, and what the idiom looks for.

Every function normalises the last dimension of ``hidden_states`` ``[..., hidden]``. ``weight`` and ``bias``
are ``[hidden]``, or ``[groups, hidden]`` for ``hidden_states`` ``[..., groups, hidden]``.
``normalized_shape`` is ``(hidden,)``, as torch's operator takes it. The formulas differ in where they cast.
The idiom reads this file as text: each body is the formula, step by step. The last two are what torch's
``nn.LayerNorm`` computes where a method calls it: torch's own operator, which rounds once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional


def weight_before_cast(hidden_states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return ``weight * xhat``, both in float32, cast to the input's dtype."""
    x32 = hidden_states.float()
    mean = x32.mean(dim=-1, keepdim=True)
    variance = (x32 - mean).square().mean(dim=-1, keepdim=True)
    return (weight.float() * ((x32 - mean) * torch.rsqrt(variance + eps))).to(hidden_states.dtype)


def cast_before_weight_and_bias(
    hidden_states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> torch.Tensor:
    """Return ``weight * xhat + bias``: ``xhat`` in float32 is cast to the input's dtype first."""
    x32 = hidden_states.float()
    mean = x32.mean(dim=-1, keepdim=True)
    variance = (x32 - mean).square().mean(dim=-1, keepdim=True)
    normalised = (x32 - mean) / torch.sqrt(variance + eps)
    return weight * normalised.to(hidden_states.dtype) + bias


def operator_before_weight_and_bias(
    hidden_states: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """`cast_before_weight_and_bias`, where torch's operator computes ``xhat``."""
    return functional.layer_norm(hidden_states, normalized_shape, None, None, eps) * weight + bias


def weight_and_bias_before_cast(
    hidden_states: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Return ``weight * xhat + bias`` from torch's operator in float32, cast to the input's dtype."""
    x32 = hidden_states.float()
    return functional.layer_norm(x32, normalized_shape, weight, bias, eps).to(hidden_states.dtype)


def unweighted(hidden_states: torch.Tensor, normalized_shape: Sequence[int], eps: float) -> torch.Tensor:
    """Return ``xhat`` from torch's operator in float32, cast to the input's dtype."""
    x32 = hidden_states.float()
    return functional.layer_norm(x32, normalized_shape, None, None, eps).to(hidden_states.dtype)


def rounded_once(hidden_states: torch.Tensor, norm: nn.LayerNorm) -> torch.Tensor:
    """Return ``norm(hidden_states)`` without the call of the module; weight and bias may be None."""
    return functional.layer_norm(hidden_states, norm.normalized_shape, norm.weight, norm.bias, norm.eps)


def sum_rounded_once(
    residual: torch.Tensor, hidden_states: torch.Tensor, norm: nn.LayerNorm
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum and what ``norm`` makes of it."""
    total = residual + hidden_states
    return total, rounded_once(total, norm)
