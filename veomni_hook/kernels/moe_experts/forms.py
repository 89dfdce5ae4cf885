"""Differences between the variants of experts with stacked weights, and the operands of a call.

Each variant computes ``sum_k w_k * (gate(x U + u) D + d)``: two products with the weights of the pair's
expert, and between them the gate of `torch_gating`. Biases are optional.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from veomni_hook.kernels.moe_experts.variants import LAYOUTS
from veomni_hook.kernels.shared.activations import name_of, unknown
from veomni_hook.kernels.shared.operand_checks import not_plain, untraceable

__all__ = [
    "Form",
    "Operands",
    "compute_dtype",
    "form_of",
    "kept_dtype",
    "kept_shape",
    "refuses",
    "taken_apart",
]


class Form(NamedTuple):
    """The non-tensor part of a call.

    ``activation`` is a name in `activations.FUNCTIONS`. ``limit`` and ``alpha`` are 0 if the variant has
    none. ``dtype`` is the dtype of the products. With ``float8``, their operands are
    cast to float8 first, with ``mx`` to MXFP8.
    """

    variant: str
    activation: str
    limit: float
    alpha: float
    dtype: torch.dtype
    float8: bool = False
    mx: bool = False


class Operands(NamedTuple):
    """The tensors of a call.

    Attributes:
        hidden_states: ``[tokens, hidden]``.
        top_k_index: ``[tokens, k]``; ids without an expert add nothing.
        top_k_weights: ``[tokens, k]``, of any floating-point dtype.
        up: stacked weights of the first product, ``[E, width, hidden]``, or ``[E, hidden, width]`` if the
            layout is transposed; ``width`` counts gate and up.
        up_bias: ``[E, width]``.
        down: stacked weights of the second product, ``[E, hidden, inner]`` or ``[E, inner, hidden]``.
        down_bias: ``[E, hidden]``.
    """

    hidden_states: Tensor
    top_k_index: Tensor
    top_k_weights: Tensor
    up: Tensor
    up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


def taken_apart(operands: Sequence[Any]) -> tuple[Operands, Sequence[Any]]:
    """Split the operands of a variant's reference into tensors and other operands."""
    if len(operands) > 7 and isinstance(operands[5], Tensor):
        return Operands(*operands[:7]), operands[7:]
    hidden_states, index, weights, up, down = operands[:5]
    return Operands(hidden_states, index, weights, up, None, down, None), operands[5:]


def form_of(variant: str, operands: Operands, rest: Sequence[Any]) -> Form:
    """Return the form of a call; ``rest`` are the non-tensor operands of the variant's reference."""
    named = dict(zip(LAYOUTS[variant].rest, rest, strict=True))
    activation = name_of(named["act_fn"]) if "act_fn" in named else "sigmoid"
    assert activation is not None, unknown(named["act_fn"])  # noqa: S101 - `refuses` was asked
    alpha, limit = (float(named.get(name, 0.0)) for name in ("alpha", "limit"))
    return Form(variant, activation, limit, alpha, compute_dtype(variant, operands))


def compute_dtype(variant: str, operands: Operands) -> torch.dtype:
    """Return the dtype of the products: autocast's dtype, float32 or that of the hidden states."""
    x = operands.hidden_states
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.dtype is not torch.float64:
        return torch.get_autocast_dtype(kind)
    return torch.float32 if LAYOUTS[variant].in_float32 else x.dtype


def kept_shape(operands: Operands, form: Form, *, keep: bool) -> tuple[int, int]:
    """The shape of the first product of all pairs; empty unless ``keep``."""
    width = operands.up.shape[2 if LAYOUTS[form.variant].transposed else 1]
    return operands.top_k_index.numel() if keep else 0, width


def kept_dtype(operands: Operands, form: Form) -> torch.dtype:
    """The dtype of the first product with its bias, as upstream's operators promote it."""
    if LAYOUTS[form.variant].in_float32:
        return torch.float32
    bias = operands.up_bias
    return form.dtype if bias is None else torch.promote_types(form.dtype, bias.dtype)


def refuses(owner: object, *operands: object) -> str | None:
    """Return why the upstream code of the experts ``owner`` must run, or None."""
    tensors, rest = taken_apart(operands)
    return unsuited(tensors) or unknown_rest(rest) or untraceable()


def unsuited(operands: Operands) -> str | None:
    """Return why these tensors are not supported, or None."""
    reason = not_plain(*(operand for operand in operands if operand is not None))
    if reason is not None:
        return reason
    x, index, weights, up, up_bias, down, _ = operands
    if x.ndim != 2 or index.ndim != 2 or index.shape != weights.shape or index.shape[0] != x.shape[0]:
        return f"hidden states {[*x.shape]}, ids {[*index.shape]} and weights {[*weights.shape]} do not match"
    if index.dtype not in (torch.int64, torch.int32):
        return f"expert ids have dtype {index.dtype}"
    for tensor in (x, weights, *(() if up_bias is None else (up_bias,))):
        if not tensor.is_floating_point():
            return f"an operand has dtype {tensor.dtype}"
    return _unsuited_weights(x, up, down) or _unsuited_biases(operands)


def _unsuited_weights(x: Tensor, up: Tensor, down: Tensor) -> str | None:
    if up.ndim != 3 or down.ndim != 3 or up.shape[0] != down.shape[0]:
        return f"the shapes of the weights {[*up.shape]} and {[*down.shape]} do not match"
    for weight in (up, down):
        cast = weight.is_floating_point() and torch.is_autocast_enabled(x.device.type)
        if weight.dtype is not x.dtype and not cast:
            return f"weights have dtype {weight.dtype}, hidden states {x.dtype}"
        if weight.device != x.device:
            return f"weights are on {weight.device}, hidden states on {x.device}"
    return None


def _unsuited_biases(operands: Operands) -> str | None:
    """Return why biases are not one row per expert (upstream would broadcast them), or None."""
    for bias in (operands.up_bias, operands.down_bias):
        if bias is not None and (bias.ndim != 2 or bias.shape[0] != operands.up.shape[0]):
            return f"a bias has the shape {[*bias.shape]} for {operands.up.shape[0]} experts"
    return None


def unknown_rest(rest: Sequence[object]) -> str | None:
    """Return why the gates do not support this activation, limit or alpha, or None."""
    for value in rest:
        if type(value) in (int, float):
            continue
        if not callable(value):
            return f"{value!r} is not a number"
        if name_of(value) is None:
            return unknown(value)
    return None
