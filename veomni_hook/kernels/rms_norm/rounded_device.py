"""Device code of RMSNorm with a rounded scale; `veomni_hook.kernels.rms_norm.rounded` launches it.

With s = rsqrt(mean(x^2) + eps) and r = s.to(x.dtype), in float32, by KIND:

Forward:  EVERY_STEP   y = (weight * x).to(y.dtype) * r; x^2, its mean and mean + eps are rounded to x.dtype
          SCALED       y = x * r
          SCALE_ALONE  y = r
Backward: SCALE_ALONE  dx = -s^3 / COLUMNS * ds * x
          the others   as in `veomni_hook.kernels.rms_norm.device`, with r as the scale, by its kernel
Shapes, strides and dtypes: as there. The forwards are apart: no more than loads and stores are the same.
"""

import triton
import triton.language as tl

from veomni_hook.kernels.rms_norm.device import inverse_rms, load_factor, row_begin

__all__ = ["forward", "inverse_backward"]

EVERY_STEP, SCALED, SCALE_ALONE = (tl.constexpr(kind) for kind in range(3))


@triton.jit(do_not_specialize=["rows"])
def forward(
    x,  # [rows, COLUMNS], strided: the input
    weight,  # [COLUMNS]; only read if KIND is EVERY_STEP
    y,  # [rows, COLUMNS], or [rows] if KIND is SCALE_ALONE: the result
    scale,  # [rows], float32: what the backward needs, s if KIND is SCALE_ALONE, otherwise r
    rows,
    size_x_1, size_x_2, stride_x_0, stride_x_1, stride_x_2,
    eps,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,  # a power of two that holds COLUMNS
    ROWS: tl.constexpr,  # per program
    KIND: tl.constexpr,
):  # fmt: skip
    """y by KIND, as above. Grid: cdiv(rows, ROWS)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < COLUMNS
    kept = (row < rows)[:, None] & inside[None, :]
    x_dtype = x.dtype.element_ty
    x_begin = row_begin(row, size_x_1, size_x_2, stride_x_0, stride_x_1, stride_x_2)
    x32 = tl.load(x + x_begin[:, None] + column[None, :], mask=kept, other=0.0).to(tl.float32)
    if KIND == EVERY_STEP:
        square = (x32 * x32).to(x_dtype).to(tl.float32)
        mean = (tl.sum(square, axis=1) / COLUMNS).to(x_dtype).to(tl.float32)
        s = tl.rsqrt((mean + eps).to(x_dtype).to(tl.float32))
    else:
        s = inverse_rms(x32, eps, COLUMNS)
    rounded = s.to(x_dtype)
    if KIND == SCALE_ALONE:
        tl.store(y + row, rounded, mask=row < rows)
        tl.store(scale + row, s, mask=row < rows)
    else:
        result = x32
        if KIND == EVERY_STEP:
            factor = load_factor(weight, column, inside, 1, BLOCK)
            result = (x32 * factor[None, :]).to(y.dtype.element_ty).to(tl.float32)
        result = result * rounded.to(tl.float32)[:, None]
        tl.store(y + row[:, None] * COLUMNS + column[None, :], result.to(y.dtype.element_ty), mask=kept)
        tl.store(scale + row, rounded.to(tl.float32), mask=row < rows)


@triton.jit(do_not_specialize=["rows"])
def inverse_backward(
    x,  # [rows, COLUMNS], strided: the forward's input
    scale,  # [rows], float32: the forward's s
    ds,  # [rows], the dtype of x: the gradient of y
    dx,  # [rows, COLUMNS], the dtype of x: the result
    rows,
    size_x_1, size_x_2, stride_x_0, stride_x_1, stride_x_2,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,  # a power of two that holds COLUMNS
    ROWS: tl.constexpr,  # per program
):  # fmt: skip
    """dx = -s^3 / COLUMNS * ds * x, for SCALE_ALONE. Grid: cdiv(rows, ROWS)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    column = tl.arange(0, BLOCK)
    kept = (row < rows)[:, None] & (column < COLUMNS)[None, :]
    x_begin = row_begin(row, size_x_1, size_x_2, stride_x_0, stride_x_1, stride_x_2)
    x32 = tl.load(x + x_begin[:, None] + column[None, :], mask=kept, other=0.0).to(tl.float32)
    s = tl.load(scale + row, mask=row < rows, other=0.0)
    slope = tl.load(ds + row, mask=row < rows, other=0.0).to(tl.float32) * s * s * s / -COLUMNS
    result = (x32 * slope[:, None]).to(dx.dtype.element_ty)
    tl.store(dx + row[:, None] * COLUMNS + column[None, :], result, mask=kept)
