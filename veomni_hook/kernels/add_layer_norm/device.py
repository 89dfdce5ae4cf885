"""Device code of an addition and LayerNorm; `veomni_hook.kernels.add_layer_norm.triton` launches it.

Forward:  total = (residual + hidden).to(dtype),  y = weight * xhat + bias, xhat that of total, in float32
Backward: the kernel `veomni_hook.kernels.layer_norm.device.backward` with ADDED
Shapes: residual, hidden, total, y [rows, COLUMNS]. Strides and dtypes: as there.
"""

import triton
import triton.language as tl

from veomni_hook.kernels.layer_norm.device import standardised
from veomni_hook.kernels.rms_norm.device import load_factor, row_begin

__all__ = ["forward"]


@triton.jit(do_not_specialize=["rows"])
def forward(
    residual,  # [rows, COLUMNS], strided: an addend
    hidden,  # [rows, COLUMNS], strided, the dtype of residual: the other addend
    weight,  # [COLUMNS]; not read unless WEIGHTED
    bias,  # [COLUMNS]; not read unless BIASED
    total,  # [rows, COLUMNS], the dtype of residual: a result, the sum
    y,  # [rows, COLUMNS]: a result, the sum's norm
    moments,  # [2, rows], float32: the mean and the scale of the sum; not written unless KEEP
    rows,
    size_residual_1, size_residual_2, stride_residual_0, stride_residual_1, stride_residual_2,
    size_hidden_1, size_hidden_2, stride_hidden_0, stride_hidden_1, stride_hidden_2,
    eps,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,  # a power of two that holds COLUMNS
    ROWS: tl.constexpr,  # per program
    WEIGHTED: tl.constexpr,  # 0 or 1
    BIASED: tl.constexpr,  # 0 or 1
    KEEP: tl.constexpr,  # whether a backward needs the moments
):  # fmt: skip
    """The sum, its norm and its moments, as above. Grid: cdiv(rows, ROWS)."""
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
    factor = load_factor(weight, column, inside, WEIGHTED, BLOCK)
    xhat, m, s = standardised(added.to(tl.float32), kept, eps, COLUMNS)
    result = xhat * factor[None, :]
    if BIASED:
        result += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    tl.store(y + place, result.to(y.dtype.element_ty), mask=kept)
    if KEEP:
        tl.store(moments + row, m, mask=row < rows)
        tl.store(moments + rows.to(tl.int64) + row, s, mask=row < rows)
