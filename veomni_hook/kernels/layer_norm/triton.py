"""LayerNorm in Triton: one pass forward, one pass backward, and sums of partial gradients.

`veomni_hook.kernels.layer_norm.device` has the formulas (Ba, Kiros and Hinton, Layer Normalization, 2016).
Variants differ in what follows the norm: a weight, a bias, and the dtypes in between. A weight
``[groups, hidden]`` belongs to input ``[..., groups, hidden]``. Gradients are accumulated in float32. Results
are deterministic and batch-invariant, as those of `veomni_hook.kernels.rms_norm.triton`.

Saved: x, weight, the mean and the scale of each row and group in float32. Mutates: nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch.nn import functional

from veomni_hook.kernels.layer_norm.operand_checks import unfit
from veomni_hook.kernels.layer_norm.plans import backward_plan, forward_plan, sum_plan
from veomni_hook.kernels.rms_norm.tiles import MOST_COLUMNS, summed
from veomni_hook.kernels.shared.autograd import differentiable
from veomni_hook.kernels.shared.operand_checks import untraceable
from veomni_hook.kernels.shared.operators import operator

__all__ = [
    "SMALLEST",
    "added_norm",
    "cast_before_weight_and_bias",
    "loses",
    "norm",
    "operator_before_weight_and_bias",
    "refuses",
    "unweighted",
    "weight_and_bias_before_cast",
    "weight_before_cast",
]


#: Both passes over 8,192 x 1,152 values in bfloat16, on one H200: 54 us of the device instead of torch's 93,
#: and 216 us of the host instead of 117. The device's time counts in steps that are larger than this.
SMALLEST = 1 << 22


@operator(
    lambda x, weight, bias, eps, middle, inner, out: (
        x.new_empty(x.shape, dtype=out),
        x.new_empty((2, *x.shape[:-1]), dtype=torch.float32),
    )
)
def _layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    middle: torch.dtype,
    inner: torch.dtype,
    out: torch.dtype,
    keep: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    device, shape, dtype = x.device, x.shape, x.dtype
    # The kernel does not access the placeholders of absent parameters.
    factor, factor_dtype, groups = x, None, 1
    if weight is not None:
        factor, factor_dtype, groups = weight, weight.dtype, weight.shape[0] if weight.ndim == 2 else 1
    addend, addend_dtype = (x, None) if bias is None else (bias, bias.dtype)
    kind = device, (dtype, factor_dtype, addend_dtype, out), shape
    plan = forward_plan(*kind, x.stride(), groups, (middle, inner), keep)
    if plan is None:
        x = x.contiguous()
        plan = forward_plan(*kind, x.stride(), groups, (middle, inner), keep)
        assert plan is not None  # noqa: S101
    launch, grid, numbers, sizes, like = plan
    # The fastest of torch's functions for each; `torch.empty` of a `torch.Size` takes three times as long.
    y = torch.empty_like(x) if like and out is dtype else torch.empty(shape, dtype=out, device=device)
    moments = torch.empty_strided(*sizes, dtype=torch.float32, device=device) if keep else y
    if launch is not None:
        launch(grid, x, factor, addend, y, moments, *numbers, float(eps))
    return y, moments


@operator(
    lambda x, weight, moments, dy, direct, middle, out, needed: (
        x.new_empty(x.shape),
        x.new_empty((x.shape[-1] if weight is None else weight.numel()) * sum(needed), dtype=out),
    )
)
def _layer_norm_backward(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    moments: torch.Tensor,
    dy: torch.Tensor,
    direct: torch.Tensor | None,
    middle: torch.dtype,
    out: torch.dtype,
    needed: Sequence[bool],
) -> tuple[torch.Tensor, torch.Tensor]:
    added = direct is not None
    # The kernel does not access placeholders: dy for a gradient to add, x for the weight, moments for parts.
    direct = dy if direct is None else direct
    factor, factor_dtype, groups = x, None, 1
    if weight is not None:
        factor, factor_dtype, groups = weight, weight.dtype, weight.shape[0] if weight.ndim == 2 else 1
    device, shape, dtype = x.device, x.shape, x.dtype
    to_weight, to_bias = needed
    kind = device, (dtype, dy.dtype, factor_dtype), shape
    form = groups, middle, (added, to_weight, to_bias)
    plan = backward_plan(*kind, (x.stride(), dy.stride(), direct.stride()), *form)
    if plan is None:
        x, dy, direct = x.contiguous(), dy.contiguous(), direct.contiguous()
        plan = backward_plan(*kind, (x.stride(), dy.stride(), direct.stride()), *form)
        assert plan is not None  # noqa: S101
    launch, grid, numbers, parts, like = plan
    dx = torch.empty_like(x) if like else torch.empty(shape, dtype=dtype, device=device)
    if launch is None or not (to_weight or to_bias):
        if launch is not None:
            launch(grid, x, factor, moments, dy, direct, dx, moments, *numbers)
        return dx, torch.zeros(parts[0][1], dtype=out, device=device)
    partial = torch.empty_strided(*parts, dtype=torch.float32, device=device)
    launch(grid, x, factor, moments, dy, direct, dx, partial, *numbers)
    return dx, summed(partial, out)


def _backward(
    saved: Sequence[Any],
    dy: torch.Tensor,
    direct: torch.Tensor | None,
    middle: torch.dtype,
    needed: Sequence[bool],
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients of x, the weight and the bias, those of the parameters only where needed.

    Args:
        saved: the input of the norm, its weight and bias or None, and what the forward kept.
        dy: the gradient of the result.
        direct: another gradient of x, of its dtype, or None.
        middle: the dtype to which ``xhat`` is rounded.
        needed: whether the gradients of the weight and the bias are wanted.
    """
    x, weight, bias, moments = saved
    to_weight, to_bias = needed
    kinds = {parameter.dtype for parameter in (weight, bias) if parameter is not None}
    # Both are summed by one kernel, in their dtype if it is one.
    out = kinds.pop() if len(kinds) == 1 else torch.float32
    dx, both = _layer_norm_backward(x, weight, moments, dy, direct, middle, out, needed)
    if not (to_weight or to_bias):
        return dx, None, None
    shape = x.shape[-1:] if weight is None else weight.shape
    dweight, dbias = both.view(2, *shape).unbind() if to_weight and to_bias else (both.view(shape),) * 2
    return (
        dx,
        dweight.to(weight.dtype) if to_weight and weight is not None else None,
        dbias.to(bias.dtype) if to_bias and bias is not None else None,
    )


def _formula(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    middle: torch.dtype,
    inner: torch.dtype,
    out: torch.dtype,
) -> torch.Tensor:
    """Return by definition what `norm` returns."""
    y = functional.layer_norm(x.float(), x.shape[-1:], None, None, eps).to(middle)
    y = y if weight is None else (y * weight).to(inner)
    return (y if bias is None else y + bias).to(out)


norm: Callable[..., torch.Tensor] = differentiable(
    _layer_norm,
    lambda saved, rest, wanted, dy: _backward(saved, dy, None, rest[1], wanted[1:]),
    _formula,
    tensors=3,
    direct={"keep": False},
)
norm.__doc__ = """Return the norm of checked operands.

Args:
    x: ``[..., columns]``, or ``[..., groups, columns]`` with parameters of two dimensions.
    weight: ``[columns]`` or ``[groups, columns]``, or None for 1.
    bias: the same, or None for 0.
    eps: added to the variance.
    middle, inner, out: the dtypes to which ``xhat`` and its product with the weight are rounded, and that of
        the result.
"""


@operator(
    lambda residual, hidden_states, weight, bias, eps, out: (
        residual.new_empty(residual.shape),
        residual.new_empty(residual.shape, dtype=out),
        residual.new_empty((2, *residual.shape[:-1]), dtype=torch.float32),
    )
)
def _add_layer_norm(
    residual: torch.Tensor,
    hidden_states: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    out: torch.dtype,
    keep: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    device, shape, dtype = residual.device, residual.shape, residual.dtype
    # The kernel does not access the placeholders of absent parameters.
    factor, factor_dtype = (residual, None) if weight is None else (weight, weight.dtype)
    addend, addend_dtype = (residual, None) if bias is None else (bias, bias.dtype)
    kind = device, (dtype, factor_dtype, addend_dtype, out), shape
    plan = sum_plan(*kind, (residual.stride(), hidden_states.stride()), keep)
    if plan is None:
        residual, hidden_states = residual.contiguous(), hidden_states.contiguous()
        plan = sum_plan(*kind, (residual.stride(), hidden_states.stride()), keep)
        assert plan is not None  # noqa: S101
    launch, grid, numbers, sizes, like = plan
    total = torch.empty_like(residual) if like else torch.empty(shape, dtype=dtype, device=device)
    y = torch.empty_like(residual) if like and out is dtype else torch.empty(shape, dtype=out, device=device)
    moments = torch.empty_strided(*sizes, dtype=torch.float32, device=device) if keep else y
    if launch is not None:
        launch(grid, residual, hidden_states, factor, addend, total, y, moments, *numbers, float(eps))
    return total, y, moments


#: Return the sum of two addends of one dtype and its norm; takes them, the weight, the bias, eps and the
#: norm's dtype. The backward adds the gradient of the sum in float32, so that dx, the gradient of both
#: addends, is rounded once. Saved: the sum in place of x.
added_norm: Callable[..., tuple[torch.Tensor, torch.Tensor]] = differentiable(
    _add_layer_norm,
    lambda saved, rest, wanted, dtotal, dy: (
        (dtotal, None, None) if dy is None else _backward(saved, dy, dtotal, torch.float32, wanted[1:])
    ),
    lambda total, weight, bias, eps, out: (
        total,
        _formula(total, weight, bias, eps, torch.float32, torch.float32, out),
    ),
    tensors=4,
    results=2,
    addends=2,
    # The last layer's sum, or an unused norm, has no gradient: do not allocate zeros for it.
    sparse=True,
    direct={"keep": False},
)


@cache
def refuses(variant: str) -> Callable[..., str | None]:
    """Return the rule of a variant: why a call must run the upstream code, or None."""

    def rule(owner: object, hidden_states: torch.Tensor, *operands: Any) -> str | None:
        reason = unfit(variant, hidden_states, operands) or untraceable()
        if reason is None and hidden_states.shape[-1] > MOST_COLUMNS:
            return f"the kernel supports rows of at most {MOST_COLUMNS} values"
        return reason

    return rule


def loses(owner: object, hidden_states: torch.Tensor, *operands: Any) -> str | None:
    """Return why ``auto`` leaves this call to torch's operator, or None."""
    if hidden_states.numel() < SMALLEST:
        return f"fewer than {SMALLEST:,} values: torch's operator costs the host less"
    return None


def weight_before_cast(hidden_states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return ``weight * xhat``, both in float32, in the dtype of ``hidden_states`` ``[..., hidden]``."""
    return norm(hidden_states, weight, None, eps, torch.float32, torch.float32, hidden_states.dtype)


def cast_before_weight_and_bias(
    hidden_states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> torch.Tensor:
    """Return ``weight * xhat + bias``, where ``xhat`` has the dtype of ``hidden_states``."""
    inner = torch.promote_types(hidden_states.dtype, weight.dtype)
    out = torch.promote_types(inner, bias.dtype)
    return norm(hidden_states, weight, bias, eps, hidden_states.dtype, inner, out)


def operator_before_weight_and_bias(
    hidden_states: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """`cast_before_weight_and_bias`; ``normalized_shape`` is ``(hidden,)``."""
    return cast_before_weight_and_bias(hidden_states, weight, bias, eps)


def weight_and_bias_before_cast(
    hidden_states: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Return ``weight * xhat + bias``, all in float32, in the dtype of ``hidden_states``."""
    return norm(hidden_states, weight, bias, eps, torch.float32, torch.float32, hidden_states.dtype)


def unweighted(hidden_states: torch.Tensor, normalized_shape: Sequence[int], eps: float) -> torch.Tensor:
    """Return ``xhat`` in the dtype of ``hidden_states`` ``[..., hidden]``."""
    return norm(hidden_states, None, None, eps, torch.float32, torch.float32, hidden_states.dtype)
