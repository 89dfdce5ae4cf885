"""LayerNorm in Triton: one pass forward, one pass backward, and sums of partial gradients.

`veomni_hook.kernels.layer_norm.device` has the formulas (Ba, Kiros and Hinton, Layer Normalization, 2016).
Variants differ in what follows the norm: a weight, a bias, and the dtypes in between. A weight
``[groups, hidden]`` belongs to input ``[..., groups, hidden]``. Gradients are accumulated in float32. Results
are deterministic and batch-invariant, as those of `veomni_hook.kernels.rms_norm.triton`.

Saved: x, weight, the mean and the scale of each row and group in float32. Mutates: nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch.nn import functional

from veomni_hook.kernels.layer_norm.operand_checks import unfit
from veomni_hook.kernels.layer_norm.plans import backward_plan, forward_plan
from veomni_hook.kernels.rms_norm.tiles import MOST_COLUMNS, summed
from veomni_hook.kernels.shared.autograd import applied, gradients, is_recorded
from veomni_hook.kernels.shared.operand_checks import untraceable
from veomni_hook.kernels.shared.operators import define_op, on_its_device, watched

__all__ = [
    "SMALLEST",
    "cast_before_weight_and_bias",
    "gradients",
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


def _forward_op(  # noqa: PLR0913, PLR0917 - the op's schema
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    middle: torch.dtype,
    inner: torch.dtype,
    out: torch.dtype,
    keep: bool = True,  # noqa: FBT001, FBT002 - not in the op's schema
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
    y = torch.empty_like(x) if like else torch.empty(shape, dtype=out, device=device)
    moments = torch.empty_strided(*sizes, dtype=torch.float32, device=device) if keep else y
    if launch is not None:
        launch(grid, x, factor, addend, y, moments, *numbers, float(eps))
    return y, moments


def _backward_op(  # noqa: PLR0913, PLR0917 - the op's schema
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


def _forward_fake(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    middle: torch.dtype,
    inner: torch.dtype,
    out: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape, dtype=out), x.new_empty((2, *x.shape[:-1]), dtype=torch.float32)


def _backward_fake(  # noqa: PLR0913, PLR0917 - the op's schema
    x: torch.Tensor,
    weight: torch.Tensor | None,
    moments: torch.Tensor,
    dy: torch.Tensor,
    direct: torch.Tensor | None,
    middle: torch.dtype,
    out: torch.dtype,
    needed: Sequence[bool],
) -> tuple[torch.Tensor, torch.Tensor]:
    width = x.shape[-1] if weight is None else weight.numel()
    return x.new_empty(x.shape), x.new_empty(width * sum(needed), dtype=out)


#: The forward without the moments, which only a backward reads; if nothing needs a gradient.
_infer = on_its_device(partial(_forward_op, keep=False))
_FORWARD = define_op(
    "layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps, ScalarType middle, ScalarType inner,"
    " ScalarType out) -> (Tensor, Tensor)",
    _forward_op,
    _forward_fake,
)
_BACKWARD = define_op(
    "layer_norm_backward(Tensor x, Tensor? weight, Tensor moments, Tensor dy, Tensor? direct,"
    " ScalarType middle, ScalarType out, bool[] needed) -> (Tensor, Tensor)",
    _backward_op,
    _backward_fake,
)


def backward(  # noqa: PLR0913, PLR0917 - what the backward of a norm needs
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    moments: torch.Tensor,
    dy: torch.Tensor,
    direct: torch.Tensor | None,
    middle: torch.dtype,
    needed: tuple[bool, bool],
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients of x, the weight and the bias, those of the parameters only where needed.

    Args:
        x: the input of the norm.
        weight: its weight, or None.
        bias: its bias, or None.
        moments: what the forward kept.
        dy: the gradient of the result.
        direct: another gradient of x, of its dtype, or None.
        middle: the dtype to which ``xhat`` is rounded.
        needed: whether the gradients of the weight and the bias are wanted.
    """
    to_weight, to_bias = needed
    kinds = {parameter.dtype for parameter in (weight, bias) if parameter is not None}
    # Both are summed by one kernel, in their dtype if it is one.
    out = kinds.pop() if len(kinds) == 1 else torch.float32
    dx, both = _BACKWARD(x, weight, moments, dy, direct, middle, out, needed)
    if not (to_weight or to_bias):
        return dx, None, None
    shape = x.shape[-1:] if weight is None else weight.shape
    dweight, dbias = both.view(2, *shape).unbind() if to_weight and to_bias else (both.view(shape),) * 2
    return (
        dx,
        dweight.to(weight.dtype) if to_weight and weight is not None else None,
        dbias.to(bias.dtype) if to_bias and bias is not None else None,
    )


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        *dtypes: torch.dtype,
    ) -> torch.Tensor:
        y, moments = _FORWARD(x, weight, bias, eps, *dtypes)
        ctx.save_for_backward(x, weight, bias, moments)
        ctx.eps, ctx.dtypes = eps, dtypes
        return y  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, bias, moments = ctx.saved_tensors
        wanted = to_x, to_weight, to_bias = ctx.needs_input_grad[:3]
        if is_recorded():
            definition = partial(formula, eps=ctx.eps, dtypes=ctx.dtypes)
            return *gradients(definition, (x, weight, bias), wanted, (dy,)), *[None] * 4
        needed = to_weight, to_bias
        dx, dweight, dbias = backward(x, weight, bias, moments, dy, None, ctx.dtypes[0], needed)
        return dx if to_x else None, dweight, dbias, *[None] * 4


def formula(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    *,
    eps: float,
    dtypes: Sequence[torch.dtype],
) -> torch.Tensor:
    """Return by definition what `norm` returns."""
    middle, inner, out = dtypes
    y = functional.layer_norm(x.float(), x.shape[-1:], None, None, eps).to(middle)
    y = y if weight is None else (y * weight).to(inner)
    return (y if bias is None else y + bias).to(out)


_apply = applied(_LayerNorm)


def norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    *dtypes: torch.dtype,
) -> torch.Tensor:
    """Return the norm of checked operands, with a gradient where one is needed.

    Args:
        x: ``[..., columns]``, or ``[..., groups, columns]`` with parameters of two dimensions.
        weight: ``[columns]`` or ``[groups, columns]``, or None for 1.
        bias: the same, or None for 0.
        eps: added to the variance.
        dtypes: to which ``xhat`` and its product with the weight are rounded, and that of the result.
    """
    if torch.is_grad_enabled() and (
        x.requires_grad
        or (weight is not None and weight.requires_grad)
        or (bias is not None and bias.requires_grad)
    ):
        return _apply(x, weight, bias, eps, *dtypes)  # type: ignore[no-any-return]
    forward = _FORWARD if watched() else _infer
    return forward(x, weight, bias, eps, *dtypes)[0]  # type: ignore[no-any-return]


@cache
def refuses(variant: str) -> Callable[..., str | None]:
    """Return the rule of a variant: why a call must run the upstream code, or None."""

    def rule(owner: Any, hidden_states: torch.Tensor, *operands: Any) -> str | None:
        reason = unfit(variant, hidden_states, operands) or untraceable()
        if reason is None and hidden_states.shape[-1] > MOST_COLUMNS:
            return f"the kernel supports rows of at most {MOST_COLUMNS} values"
        return reason

    return rule


def loses(owner: Any, hidden_states: torch.Tensor, *operands: Any) -> str | None:
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
