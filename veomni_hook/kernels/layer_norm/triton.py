"""LayerNorm in Triton: one pass forward, one pass backward, and sums of partial gradients.

`veomni_hook.kernels.layer_norm.device` has the formulas (Ba, Kiros and Hinton, Layer Normalization, 2016).
Variants differ in what follows the norm: a weight, a bias, and the dtypes in between. A weight
``[groups, hidden]`` belongs to input ``[..., groups, hidden]``. Gradients are accumulated in float32. Results
are deterministic and batch-invariant, as those of `veomni_hook.kernels.rms_norm.triton`.

Saved: x, weight, the mean and the scale of each row and group in float32. Mutates: nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any

import torch

from veomni_hook.kernels.layer_norm import device as kernels
from veomni_hook.kernels.layer_norm.operand_checks import unfit
from veomni_hook.kernels.rms_norm.tiles import (
    LARGE,
    MOST_COLUMNS,
    TL,
    backward_tile,
    blocks,
    forward_tile,
    room,
    stages_of,
    summed,
    warps_of,
)
from veomni_hook.kernels.shared.autograd import applied, backward_once
from veomni_hook.kernels.shared.launch import LAUNCHES, Launch, power
from veomni_hook.kernels.shared.operand_checks import untraceable, wants_grad
from veomni_hook.kernels.shared.operators import define_op
from veomni_hook.kernels.shared.rows import Rows, readable

__all__ = [
    "SMALLEST",
    "cast_before_weight_and_bias",
    "loses",
    "operator_before_weight_and_bias",
    "refuses",
    "unweighted",
    "weight_and_bias_before_cast",
    "weight_before_cast",
]


#: Both passes over 8,192 x 1,152 values in bfloat16, on one H200: 54 us of the device instead of torch's 93,
#: and 216 us of the host instead of 117. The device's time counts in steps that are larger than this.
SMALLEST = 1 << 22
#: Wider weights do not stay in registers. Of RMSNorm's backward at 16,384 columns in bfloat16, one H200
#: reached 58 % of a copy's bandwidth with a weight that stays, 86 % with one that is read for every row.
#: And the most rows in flight then.
_MOST_HELD, _FEWEST_TILES = 8192, 3


# Launchers, cached by all Triton specialisations; `large`: row numbers do not fit into 32 bits.
@lru_cache(maxsize=LAUNCHES)
def _forward_launch(
    device: torch.device,
    dtypes: tuple[torch.dtype | None, ...],
    shape: tuple[int, int],
    x_rows: Rows,
    rounded: tuple[torch.dtype, torch.dtype],
    *,
    large: bool,
) -> tuple[Launch, int]:
    """Return the forward's launcher, and the rows per program.

    Args:
        device: where it runs.
        dtypes: those of x, the weight, the bias (None if there is none) and the result.
        shape: the columns of a group, and the number of groups.
        x_rows: the rows of x.
        rounded: the dtypes to which ``xhat`` and its product with the weight are rounded.
        large: row numbers do not fit into 32 bits.
    """
    columns, groups = shape
    block = power(columns)
    tile = forward_tile(columns)
    _, weight, bias, _ = dtypes
    steps = int(weight is not None), int(bias is not None), TL[rounded[0]], TL[rounded[1]]
    constants = columns, groups, block, tile // block, *steps
    # A product and the sum after it may become one operation, which rounds once, where both are in 16 bits.
    fused = bias is None or rounded[1] is torch.float32
    launch = Launch(kernels.forward, 5, *constants, num_warps=warps_of(tile), enable_fp_fusion=fused)
    return launch, tile // block


@lru_cache(maxsize=LAUNCHES)
def _backward_launch(
    device: torch.device,
    dtypes: tuple[torch.dtype | None, ...],
    shape: tuple[int, int],
    where: tuple[Rows, ...],
    middle: torch.dtype,
    *,
    needed: tuple[bool, bool],
    large: bool,
) -> tuple[Launch, int, int]:
    """Return the backward's launcher, the rows per program and step, and the maximum programs per group."""
    processors, memory = room(device)
    columns, groups = shape
    block = power(columns)
    tile = backward_tile(columns)
    x, dy, weight = dtypes
    assert x is not None and dy is not None  # noqa: S101
    size = x.itemsize + dy.itemsize
    again = block > _MOST_HELD
    if again:
        # Triton stages one tile less than there are stages.
        stages = min(_FEWEST_TILES, memory // (tile * (size + (weight or x).itemsize)) + 1)
    else:
        stages = stages_of(tile, tile // block * columns, size, memory)
    steps = int(weight is not None), TL[middle], *needed, again, stages
    constants = columns, groups, block, tile // block, *steps
    launch = Launch(kernels.backward, 7, *constants, num_warps=warps_of(tile))
    return launch, tile // block, blocks(processors, groups)


def _forward_op(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    middle: torch.dtype,
    inner: torch.dtype,
    out: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    shape, device = x.shape, x.device
    y = torch.empty(shape, dtype=out, device=device)
    x, x_rows, groups = _rows_of_groups(x, weight)
    columns = shape[-1]
    moments = torch.empty((2, *shape[:-1]), dtype=torch.float32, device=device)
    if not y.numel():
        return y, moments
    rows = y.numel() // (columns * groups)
    launch, size = _forward_launch(
        device, (x.dtype, _dtype(weight), _dtype(bias), out), (columns, groups), x_rows,
        (middle, inner), large=rows >= LARGE,
    )  # fmt: skip
    # The kernel does not access the placeholders of absent parameters.
    launch(
        (-(-rows // size), groups, 1), x, x if weight is None else weight, x if bias is None else bias, y,
        moments, rows, *x_rows, float(eps),
    )  # fmt: skip
    return y, moments


def _backward_op(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.dtype,
    moments: torch.Tensor,
    dy: torch.Tensor,
    middle: torch.dtype,
    needed: Sequence[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shape, device = x.shape, x.device
    dx = torch.empty(shape, dtype=x.dtype, device=device)
    dtypes = (x if weight is None else weight).dtype, bias
    to_weight, to_bias = needed
    x, x_rows, groups = _rows_of_groups(x, weight)
    dy, dy_rows, _ = _rows_of_groups(dy, weight)
    width = shape[-1] * groups
    if not dx.numel():
        dweight, dbias = (
            torch.zeros(width if need else 0, dtype=dtype, device=device)
            for need, dtype in zip(needed, dtypes, strict=True)
        )
        return dx, dweight, dbias
    rows = dx.numel() // width
    launch, size, programs = _backward_launch(
        device, (x.dtype, dy.dtype, _dtype(weight)), (shape[-1], groups), (x_rows, dy_rows), middle,
        needed=(to_weight, to_bias), large=rows >= LARGE,
    )  # fmt: skip
    programs = min(programs, -(-rows // size))
    # The kernel does not access placeholders.
    partial = [
        torch.empty((programs, width), dtype=torch.float32, device=device) if need else moments
        for need in needed
    ]
    launch(
        (programs, groups, 1), x, x if weight is None else weight, moments, dy, dx, *partial, rows,
        *x_rows, *dy_rows,
    )  # fmt: skip
    dweight, dbias = (
        summed(sums, dtype) if need else torch.empty(0, dtype=dtype, device=device)
        for sums, dtype, need in zip(partial, dtypes, needed, strict=True)
    )
    return dx, dweight, dbias


def _rows_of_groups(x: torch.Tensor, weight: torch.Tensor | None) -> tuple[torch.Tensor, Rows, int]:
    """Return ``x``, or a copy, where its rows of all groups begin, and the number of groups."""
    groups = weight.shape[0] if weight is not None and weight.ndim == 2 else 1
    x, rows = readable(x if groups == 1 else x.reshape(*x.shape[:-2], -1))
    return x, rows, groups


def _dtype(tensor: torch.Tensor | None) -> torch.dtype | None:
    return None if tensor is None else tensor.dtype


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


def _backward_fake(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.dtype,
    moments: torch.Tensor,
    dy: torch.Tensor,
    middle: torch.dtype,
    needed: Sequence[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    width = x.shape[-1] if weight is None else weight.numel()
    dtypes = (x if weight is None else weight).dtype, bias
    dweight, dbias = (
        x.new_empty(width if need else 0, dtype=dtype) for need, dtype in zip(needed, dtypes, strict=True)
    )
    return x.new_empty(x.shape), dweight, dbias


_FORWARD = define_op(
    "layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps, ScalarType middle, ScalarType inner,"
    " ScalarType out) -> (Tensor, Tensor)",
    _forward_op,
    _forward_fake,
)
_BACKWARD = define_op(
    "layer_norm_backward(Tensor x, Tensor? weight, ScalarType bias, Tensor moments, Tensor dy,"
    " ScalarType middle, bool[] needed) -> (Tensor, Tensor, Tensor)",
    _backward_op,
    _backward_fake,
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
        ctx.save_for_backward(x, weight, moments)
        ctx.bias = x.dtype if bias is None else bias.dtype
        ctx.middle = dtypes[0]
        return y  # type: ignore[no-any-return]

    @staticmethod
    @backward_once
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, moments = ctx.saved_tensors
        to_x, *needed = ctx.needs_input_grad[:3]
        dx, dweight, dbias = _BACKWARD(x, weight, ctx.bias, moments, dy, ctx.middle, needed)
        shape = x.shape[-1:] if weight is None else weight.shape
        parameters = (
            grad.view(shape) if need else None for grad, need in zip((dweight, dbias), needed, strict=True)
        )
        return dx if to_x else None, *parameters, None, None, None, None


_apply = applied(_LayerNorm)


def _norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    *dtypes: torch.dtype,
) -> torch.Tensor:
    tensors = (x, *(each for each in (weight, bias) if each is not None))
    if wants_grad(*tensors):
        return _apply(x, weight, bias, eps, *dtypes)  # type: ignore[no-any-return]
    return _FORWARD(x, weight, bias, eps, *dtypes)[0]  # type: ignore[no-any-return]


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
    return _norm(hidden_states, weight, None, eps, torch.float32, torch.float32, hidden_states.dtype)


def cast_before_weight_and_bias(
    hidden_states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> torch.Tensor:
    """Return ``weight * xhat + bias``, where ``xhat`` has the dtype of ``hidden_states``."""
    inner = torch.promote_types(hidden_states.dtype, weight.dtype)
    out = torch.promote_types(inner, bias.dtype)
    return _norm(hidden_states, weight, bias, eps, hidden_states.dtype, inner, out)


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
    return _norm(hidden_states, weight, bias, eps, torch.float32, torch.float32, hidden_states.dtype)


def unweighted(hidden_states: torch.Tensor, normalized_shape: Sequence[int], eps: float) -> torch.Tensor:
    """Return ``xhat`` in the dtype of ``hidden_states`` ``[..., hidden]``."""
    return _norm(hidden_states, None, None, eps, torch.float32, torch.float32, hidden_states.dtype)
