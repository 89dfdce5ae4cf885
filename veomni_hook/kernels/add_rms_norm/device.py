"""Device code of an addition and RMSNorm; `veomni_hook.kernels.add_rms_norm.triton` launches it.

Forward:  total = (residual + hidden).to(dtype),  y = factor * (total * s).to(MIDDLE), s the scale of total
Backward: the kernel `veomni_hook.kernels.rms_norm.device.backward` with ADDED
Shapes: residual, hidden, total, y [rows, COLUMNS]. The scale, ``factor``, strides and dtypes: as there.
"""

import triton
import triton.language as tl

from veomni_hook.kernels.rms_norm.device import inverse_rms, load_factor, row_begin

__all__ = ["forward"]


@triton.jit(do_not_specialize=["rows"])
def forward(
    residual,  # [rows, COLUMNS], strided: an addend
    hidden,  # [rows, COLUMNS], strided, the dtype of residual: the other addend
    weight,  # [COLUMNS]
    total,  # [rows, COLUMNS], the dtype of residual: a result, the sum
    y,  # [rows, COLUMNS]: a result, the sum's norm
    scale,  # [rows], float32: a result, s of the sum; not written unless KEEP
    rows,
    size_residual_1, size_residual_2, stride_residual_0, stride_residual_1, stride_residual_2,
    size_hidden_1, size_hidden_2, stride_hidden_0, stride_hidden_1, stride_hidden_2,
    eps,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,  # a power of two that holds COLUMNS
    ROWS: tl.constexpr,  # per program
    FACTOR: tl.constexpr,
    MIDDLE: tl.constexpr,  # dtype
    KEEP: tl.constexpr,  # whether a backward needs the scale
):  # fmt: skip
    """total = (residual + hidden).to(dtype), y = factor * (total * s).to(MIDDLE). Grid: cdiv(rows, ROWS)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < COLUMNS
    kept = (row < rows)[:, None] & inside[None, :]
    residual_begin = row_begin(
        row, size_residual_1, size_residual_2, stride_residual_0, stride_residual_1, stride_residual_2
    )  # fmt: skip
    hidden_begin = row_begin(
        row, size_hidden_1, size_hidden_2, stride_hidden_0, stride_hidden_1, stride_hidden_2
    )  # fmt: skip
    a = tl.load(residual + residual_begin[:, None] + column[None, :], mask=kept, other=0.0).to(tl.float32)
    b = tl.load(hidden + hidden_begin[:, None] + column[None, :], mask=kept, other=0.0).to(tl.float32)
    place = row[:, None] * COLUMNS + column[None, :]
    added = (a + b).to(total.dtype.element_ty)
    tl.store(total + place, added, mask=kept)
    x32 = added.to(tl.float32)
    factor = load_factor(weight, column, inside, FACTOR, BLOCK)
    s = inverse_rms(x32, eps, COLUMNS)
    result = (x32 * s[:, None]).to(MIDDLE).to(tl.float32) * factor[None, :]
    tl.store(y + place, result.to(y.dtype.element_ty), mask=kept)
    if KEEP:
        tl.store(scale + row, s, mask=row < rows)
