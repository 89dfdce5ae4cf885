"""RMSNorm with ``npu_rms_norm``: one operator forward, one backward.

With ``n(x, w) = npu_rms_norm(x, w)``, which is ``w * x * rs`` for x and w of one dtype, variants are

    in the dtype of x, if weight and x share it, since the operator reads x once:  n(x, weight)
    in float32, if the formula multiplies there:  n(x32, factor32).to(out)
    with ones for a weight, if a cast or another factor comes between:  factor * n(x, 1).to(middle)

torch_npu does not document where its operator rounds 16-bit operands. The first form is within one rounding
of upstream's result; the second and third round where upstream does.
Shapes: x ``[..., hidden]``, weight ``[hidden]``. Saved: the operator's inputs, and its scale ``[..., 1]`` in
float32. Mutates: nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from veomni_hook.kernels.rms_norm import reference
from veomni_hook.kernels.shared import ascend
from veomni_hook.kernels.shared.autograd import differentiable
from veomni_hook.kernels.shared.operators import operator

__all__ = [
    "cast_before_weight",
    "cast_before_weight_gated",
    "cast_to_weight",
    "gate_before_norm",
    "gate_before_norm_grouped",
    "normalised",
    "npu_rms_norm_backward",
    "one_plus_weight",
    "one_plus_weight_before_norm",
    "one_plus_weight_grouped",
    "one_plus_weight_rounded",
    "refuses",
    "refuses_gate_before",
    "refuses_grouped",
    "refuses_unweighted",
    "unweighted",
    "weight_before_cast",
    "weight_before_cast_gated",
]

# The operator takes 2 to 8 dimensions.
_MOST_DIMENSIONS = 8


@operator(
    lambda x, weight, eps: (
        x.new_empty(x.shape),
        x.new_empty((*x.shape[: x.ndim - weight.ndim], *[1] * weight.ndim), dtype=torch.float32),
    )
)
def _npu_rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    y, scale = ascend.call("npu_rms_norm", x, weight, eps)
    return y, scale


@operator(lambda dy, x, weight, scale: (x.new_empty(x.shape), x.new_empty(weight.shape, dtype=torch.float32)))
def npu_rms_norm_backward(dy: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of x, and of the weight in float32; ``scale`` is what the forward kept."""
    dx, dweight = ascend.call("npu_rms_norm_backward", dy, x, weight, scale)
    return dx, dweight


def _gradients(
    saved: Sequence[Tensor], _: object, wanted: Sequence[bool], dy: Tensor
) -> tuple[Tensor, Tensor]:
    dx, dweight = npu_rms_norm_backward(dy.contiguous(), *saved)
    return dx, dweight.to(saved[1].dtype)


#: Takes x, weight and eps.
_norm: Callable[..., Tensor] = differentiable(
    _npu_rms_norm, _gradients, reference.cast_before_weight, tensors=2
)


def normalised(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Return ``weight * x * rs`` from the operator; ``weight`` has the dtype of ``x``, None means ones."""
    weight = x.new_ones(x.shape[-1]) if weight is None else weight
    if not x.numel():
        return x * weight
    # Flatten to two dimensions if the operator does not support the shape.
    rows = x.reshape(-1, x.shape[-1]) if x.ndim == 1 or x.ndim > _MOST_DIMENSIONS else x
    return _norm(rows.contiguous(), weight.contiguous(), float(eps)).view(x.shape)


def cast_before_weight(hidden_states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return ``weight * xhat``, where ``xhat`` has the dtype of ``hidden_states``."""
    if weight.dtype is hidden_states.dtype:
        return normalised(hidden_states, weight, eps)
    return weight * normalised(hidden_states, None, eps)


def weight_before_cast(hidden_states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return ``weight * xhat``, both in float32, in the dtype of ``hidden_states``."""
    return normalised(hidden_states.float(), weight.float(), eps).to(hidden_states.dtype)


def cast_to_weight(hidden_states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return ``weight * xhat``, where ``xhat`` has the dtype of ``weight``."""
    if weight.dtype is hidden_states.dtype:
        return normalised(hidden_states, weight, eps)
    if weight.dtype is torch.float32:
        return normalised(hidden_states.float(), weight, eps)
    return weight * normalised(hidden_states.float(), None, eps).to(weight.dtype)


def one_plus_weight(hidden_states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return ``(1 + weight) * xhat`` in float32, in the dtype of ``hidden_states``."""
    return weight_before_cast(hidden_states, 1 + weight.float(), eps)


def one_plus_weight_rounded(hidden_states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`one_plus_weight` with ``1 + weight`` rounded to the dtype of ``weight``."""
    return weight_before_cast(hidden_states, 1.0 + weight, eps)


def one_plus_weight_before_norm(hidden_states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the normalised ``(1 + weight) * x``, which is rounded to the dtype of ``hidden_states``."""
    scaled = hidden_states.float() * (1.0 + weight).float()
    return unweighted(scaled.to(hidden_states.dtype), eps)


def one_plus_weight_grouped(hidden_states: Tensor, weight: Tensor, eps: float, group_size: int) -> Tensor:
    """`one_plus_weight`, with each ``group_size`` neighbouring values normalised separately."""
    output = _in_groups(hidden_states.float(), eps, group_size) * (1 + weight.float())
    return output.to(hidden_states.dtype)


def unweighted(hidden_states: Tensor, eps: float) -> Tensor:
    """Return ``xhat`` in the dtype of ``hidden_states``."""
    return normalised(hidden_states, None, eps)


def cast_before_weight_gated(
    hidden_states: Tensor, gate: Tensor, weight: Tensor, eps: float, activation: Callable[[Tensor], Tensor]
) -> Tensor:
    """`cast_before_weight` times ``activation(gate)`` in float32, in the dtype of ``hidden_states``."""
    output = cast_before_weight(hidden_states, weight, eps) * activation(gate.float())
    return output.to(hidden_states.dtype)


def weight_before_cast_gated(
    hidden_states: Tensor, gate: Tensor, weight: Tensor, eps: float, activation: Callable[[Tensor], Tensor]
) -> Tensor:
    """``weight * xhat * activation(gate)``, all in float32, in the dtype of ``hidden_states``."""
    output = normalised(hidden_states.float(), weight.float(), eps) * activation(gate.float())
    return output.to(hidden_states.dtype)


def gate_before_norm(hidden_states: Tensor, gate: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """`cast_before_weight` of ``x * silu(gate)``, which is in float32; without a gate, of ``x``."""
    return weight * normalised(_gated(hidden_states, gate), None, eps).to(hidden_states.dtype)


def gate_before_norm_grouped(
    hidden_states: Tensor, gate: Tensor | None, weight: Tensor, eps: float, group_size: int
) -> Tensor:
    """`gate_before_norm`, with each ``group_size`` neighbouring values normalised separately."""
    output = _in_groups(_gated(hidden_states, gate), eps, group_size)
    return weight * output.to(hidden_states.dtype)


def _gated(x: Tensor, gate: Tensor | None) -> Tensor:
    return x.float() if gate is None else x.float() * functional.silu(gate.float())


def _in_groups(x: Tensor, eps: float, group_size: int) -> Tensor:
    return normalised(x.reshape(-1, group_size), None, eps).view(x.shape)


def refuses(owner: object, hidden_states: Tensor, weight: Tensor, eps: float) -> str | None:
    """Return why this call must run the upstream code, or None."""
    reason = refuses_unweighted(owner, hidden_states, eps) or ascend.unfit(hidden_states, weight)
    if reason is not None:
        return reason
    if hidden_states.shape[-1:] != weight.shape:
        return "the weight does not match the last dimension of the input"
    return None


def refuses_unweighted(owner: object, hidden_states: Tensor, eps: float) -> str | None:
    """Return why this call must run the upstream code, or None."""
    reason = ascend.unfit(hidden_states)
    if reason is not None:
        return reason
    if not isinstance(eps, (float, int)):
        return f"eps is a {type(eps).__name__}"
    return None if hidden_states.ndim else "the input has no dimension"


def refuses_gate_before(
    owner: object, hidden_states: Tensor, gate: Tensor | None, weight: Tensor, eps: float, *_: object
) -> str | None:
    """Return why this call must run the upstream code, or None; any activation is supported."""
    reason = refuses(owner, hidden_states, weight, eps)
    if reason is not None or gate is None:
        return reason
    if gate.shape != hidden_states.shape:
        return "the gate and the input have different shapes"
    return ascend.unfit(hidden_states, gate)


def refuses_grouped(owner: object, hidden_states: Tensor, *operands: Any) -> str | None:
    """Return why this call must run the upstream code, or None; the last operand is the group size."""
    *others, group_size = operands
    gate, weight, eps = others if len(others) == 3 else (None, *others)
    reason = refuses_gate_before(owner, hidden_states, gate, weight, eps)
    if reason is not None:
        return reason
    if not isinstance(group_size, int) or group_size < 1 or hidden_states.shape[-1] % group_size:
        return f"rows of {hidden_states.shape[-1]} values do not divide into groups of {group_size}"
    return None
