"""RMSNorm by definition, one function for each formula: the oracle, and what the idiom looks for.

Every function normalises the last dimension of ``hidden_states`` ``[..., hidden]``; ``weight`` is
``[hidden]`` and ``gate`` has the shape of ``hidden_states``. The formulas differ in where they cast, which
changes a quarter of all bfloat16 results. The idiom reads this file as text: each body is the formula, step
by step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional


def _normalised(x: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)


def cast_before_weight(hidden_states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return ``weight * xhat``: ``xhat`` is computed in float32 and cast to the input's dtype first.

    The result has the promoted dtype of input and weight.
    """
    return weight * _normalised(hidden_states.float(), eps).to(hidden_states.dtype)


def weight_before_cast(hidden_states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return ``weight * xhat``, both in float32, cast to the input's dtype."""
    return (weight * _normalised(hidden_states.float(), eps)).to(hidden_states.dtype)


def cast_to_weight(hidden_states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return ``weight * xhat``: ``xhat`` is cast to a 16-bit weight's dtype first, else stays in float32."""
    scale = torch.rsqrt(hidden_states.float().square().mean(dim=-1, keepdim=True) + eps)
    normalised = hidden_states * scale
    if weight.dtype in (torch.float16, torch.bfloat16):
        normalised = normalised.to(weight.dtype)
    return weight * normalised


def without_cast(hidden_states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return ``weight * x * scale``, from left to right and in the dtypes that come."""
    return weight * hidden_states * torch.rsqrt(hidden_states.square().mean(dim=-1, keepdim=True) + eps)


def divided_by_root(hidden_states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return ``weight * (x / rms)`` in float32, cast to the input's dtype; a quotient rounds otherwise."""
    x32 = hidden_states.float()
    normalised = x32 / torch.sqrt(x32.square().mean(dim=-1, keepdim=True) + eps)
    return (normalised * weight).to(hidden_states.dtype)


def one_plus_weight(hidden_states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return ``(1 + weight) * xhat``, all in float32, cast to the input's dtype."""
    return (_normalised(hidden_states.float(), eps) * (1 + weight.float())).to(hidden_states.dtype)


def one_plus_weight_rounded(hidden_states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`one_plus_weight` with ``1 + weight`` in the weight's own dtype."""
    return (_normalised(hidden_states.float(), eps) * (1.0 + weight).float()).to(hidden_states.dtype)


def one_plus_weight_before_norm(
    hidden_states: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Return the normalised ``(1 + weight) * x``; the product is cast to the input's dtype in between."""
    scaled = (hidden_states.float() * (1.0 + weight).float()).to(hidden_states.dtype)
    return _normalised(scaled.float(), eps).to(hidden_states.dtype)


def one_plus_weight_grouped(
    hidden_states: torch.Tensor, weight: torch.Tensor, eps: float, group_size: int
) -> torch.Tensor:
    """`one_plus_weight`, where each ``group_size`` neighbouring values are normalised by themselves."""
    x32 = hidden_states.float()
    normalised = _normalised(x32.reshape(*x32.shape[:-1], -1, group_size), eps).flatten(-2)
    return (normalised * (1 + weight.float())).to(hidden_states.dtype)


def unweighted(hidden_states: torch.Tensor, eps: float) -> torch.Tensor:
    """Return ``xhat``, computed in float32 and cast to the input's dtype."""
    return _normalised(hidden_states.float(), eps).to(hidden_states.dtype)


def inverse_rms(hidden_states: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the scale alone, ``[..., 1]``: computed in float32 and cast to the input's dtype."""
    mean = hidden_states.float().square().mean(dim=-1, keepdim=True)
    return torch.rsqrt(mean + eps).to(hidden_states.dtype)


def unweighted_rounded_scale(hidden_states: torch.Tensor, eps: float) -> torch.Tensor:
    """Return ``x * scale``: the scale is cast to the input's dtype, the product is in that dtype."""
    return hidden_states * inverse_rms(hidden_states, eps)


def cast_before_weight_gated(
    hidden_states: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    activation: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """`cast_before_weight` times ``activation(gate)`` in float32, cast to the input's dtype."""
    return (cast_before_weight(hidden_states, weight, eps) * activation(gate.float())).to(hidden_states.dtype)


def weight_before_cast_gated(
    hidden_states: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    activation: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """``weight * xhat * activation(gate)``, all in float32, cast to the input's dtype."""
    normalised = weight * _normalised(hidden_states.float(), eps)
    return (normalised * activation(gate.float())).to(hidden_states.dtype)


def gate_before_norm(
    hidden_states: torch.Tensor, gate: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """`cast_before_weight` of ``x * silu(gate)``, which is computed in float32; without gate of ``x``."""
    x32 = hidden_states.float()
    if gate is not None:
        x32 = x32 * functional.silu(gate.float())
    return weight * _normalised(x32, eps).to(hidden_states.dtype)


def gate_before_norm_grouped(
    hidden_states: torch.Tensor, gate: torch.Tensor | None, weight: torch.Tensor, eps: float, group_size: int
) -> torch.Tensor:
    """`gate_before_norm`, where each ``group_size`` neighbouring values are normalised by themselves."""
    x32 = hidden_states.float()
    if gate is not None:
        x32 = x32 * functional.silu(gate.float())
    *leading, width = x32.shape
    count = width // group_size
    normalised = _normalised(x32.view(*leading, count, group_size), eps)
    return weight * normalised.view(*leading, count * group_size).to(hidden_states.dtype)
