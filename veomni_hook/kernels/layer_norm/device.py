"""Device code of LayerNorm; `veomni_hook.kernels.layer_norm.triton` launches it.

With m = mean(x), s = rsqrt(mean((x - m)^2) + eps), xhat = (x - m) * s for each row of each group, in float32:

Forward:  y = (weight * xhat.to(MIDDLE)).to(INNER) + bias
Backward: dx = s * (g - mean(g) - xhat * mean(g * xhat)) + direct, g = weight * dy
          dweight = sum over rows of dy * xhat.to(MIDDLE), dbias = sum over rows of dy
          direct is a gradient that x also has, and is added only if ADDED.
Of a sum: x = (residual + hidden).to(dtype), which is a result, too; GROUPS is 1, MIDDLE and INNER float32.
Shapes: rows have GROUPS groups of COLUMNS columns. Strides and dtypes: as in
`veomni_hook.kernels.rms_norm.device`, whose kernels are apart: what only LayerNorm reads and writes would
make every launch of RMSNorm dearer.
"""

import triton
import triton.language as tl

from veomni_hook.kernels.rms_norm.device import load_factor, row_begin

__all__ = ["backward", "forward", "forward_of_sum"]


@triton.jit
def standardised(
    x32,  # [ROWS, BLOCK], float32: rows; 0 where not kept
    kept,  # [ROWS, BLOCK]: what belongs to a row
    eps,
    COLUMNS: tl.constexpr,
):
    """Return xhat [ROWS, BLOCK], 0 where not kept, and m and s [ROWS], all in float32."""
    m = tl.sum(x32, axis=1) / COLUMNS
    centred = tl.where(kept, x32 - m[:, None], 0.0)
    s = tl.rsqrt(tl.sum(centred * centred, axis=1) / COLUMNS + eps)
    return centred * s[:, None], m, s


@triton.jit(do_not_specialize=["rows"])
def forward(
    x,  # [rows, GROUPS * COLUMNS], strided: the input
    weight,  # [GROUPS * COLUMNS]; not read unless WEIGHTED
    bias,  # [GROUPS * COLUMNS]; not read unless BIASED
    y,  # [rows, GROUPS * COLUMNS]: the result
    moments,  # [2, rows, GROUPS], float32: the results m and s; not written unless KEEP
    rows,
    size_x_1, size_x_2, stride_x_0, stride_x_1, stride_x_2,
    eps,
    COLUMNS: tl.constexpr,  # of a group
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,  # a power of two that holds COLUMNS
    ROWS: tl.constexpr,  # per program
    WEIGHTED: tl.constexpr,  # 0 or 1
    BIASED: tl.constexpr,  # 0 or 1
    MIDDLE: tl.constexpr,  # dtype
    INNER: tl.constexpr,  # dtype
    KEEP: tl.constexpr,  # whether a backward needs the moments
):  # fmt: skip
    """y and the moments, as above. Grid: cdiv(rows, ROWS), GROUPS."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    column_of_group = tl.arange(0, BLOCK)
    column = tl.program_id(1) * COLUMNS + column_of_group
    inside = column_of_group < COLUMNS
    kept = (row < rows)[:, None] & inside[None, :]
    x_begin = row_begin(row, size_x_1, size_x_2, stride_x_0, stride_x_1, stride_x_2)
    x32 = tl.load(x + x_begin[:, None] + column[None, :], mask=kept, other=0.0).to(tl.float32)
    factor = load_factor(weight, column, inside, WEIGHTED, BLOCK)
    xhat, m, s = standardised(x32, kept, eps, COLUMNS)
    result = xhat.to(MIDDLE).to(tl.float32) * factor[None, :]
    if BIASED:
        addend = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
        result = result.to(INNER).to(tl.float32) + addend[None, :]
    y_place = y + row[:, None] * (GROUPS * COLUMNS) + column[None, :]
    tl.store(y_place, result.to(y.dtype.element_ty), mask=kept)
    if KEEP:
        moment = moments + row * GROUPS + tl.program_id(1)
        tl.store(moment, m, mask=row < rows)
        tl.store(moment + rows.to(tl.int64) * GROUPS, s, mask=row < rows)


@triton.jit(do_not_specialize=["rows"])
def forward_of_sum(
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


@triton.jit(do_not_specialize=["rows"])
def backward(
    x,  # [rows, GROUPS * COLUMNS], strided: the forward's input
    weight,  # [GROUPS * COLUMNS]; not read unless WEIGHTED
    moments,  # [2, rows, GROUPS], float32: the forward's m and s
    dy,  # [rows, GROUPS * COLUMNS], strided: the gradient of y
    direct,  # [rows, GROUPS * COLUMNS], strided: the gradient that is added; not read unless ADDED
    dx,  # [rows, GROUPS * COLUMNS], the dtype of x: a result
    partial,  # [programs, TO_WEIGHT + TO_BIAS, GROUPS * COLUMNS], float32: parts of dweight, then of dbias
    rows,
    size_x_1, size_x_2, stride_x_0, stride_x_1, stride_x_2,
    size_dy_1, size_dy_2, stride_dy_0, stride_dy_1, stride_dy_2,
    size_direct_1, size_direct_2, stride_direct_0, stride_direct_1, stride_direct_2,
    COLUMNS: tl.constexpr,  # of a group
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,  # a power of two that holds COLUMNS
    ROWS: tl.constexpr,  # per step of a program
    WEIGHTED: tl.constexpr,  # 0 or 1
    MIDDLE: tl.constexpr,  # dtype
    ADDED: tl.constexpr,
    TO_WEIGHT: tl.constexpr,  # 0 or 1
    TO_BIAS: tl.constexpr,  # 0 or 1
    AGAIN: tl.constexpr,  # read the weight for every row, so that it takes no registers
    STAGES: tl.constexpr,  # loads in flight
):  # fmt: skip
    """dx and the partial sums, as above.

    Grid: programs, each of which handles every programs-th block of ROWS rows; GROUPS.
    """
    column_of_group = tl.arange(0, BLOCK)
    column = tl.program_id(1) * COLUMNS + column_of_group
    inside = column_of_group < COLUMNS
    if not AGAIN:
        factor = load_factor(weight, column, inside, WEIGHTED, BLOCK)[None, :]
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    total_bias = tl.zeros([ROWS, BLOCK], tl.float32)
    for block in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = block * ROWS + tl.arange(0, ROWS).to(tl.int64)
        kept = (row < rows)[:, None] & inside[None, :]
        x_begin = row_begin(row, size_x_1, size_x_2, stride_x_0, stride_x_1, stride_x_2)
        dy_begin = row_begin(row, size_dy_1, size_dy_2, stride_dy_0, stride_dy_1, stride_dy_2)
        x32 = tl.load(x + x_begin[:, None] + column[None, :], mask=kept, other=0.0).to(tl.float32)
        dy32 = tl.load(dy + dy_begin[:, None] + column[None, :], mask=kept, other=0.0).to(tl.float32)
        if ADDED:
            direct_begin = row_begin(
                row, size_direct_1, size_direct_2, stride_direct_0, stride_direct_1, stride_direct_2
            )  # fmt: skip
            addend = tl.load(direct + direct_begin[:, None] + column[None, :], mask=kept, other=0.0)
        moment = moments + row * GROUPS + tl.program_id(1)
        m = tl.load(moment, mask=row < rows, other=0.0)
        s = tl.load(moment + rows.to(tl.int64) * GROUPS, mask=row < rows, other=0.0)
        if AGAIN:
            factor = load_factor(weight, column, inside, WEIGHTED, BLOCK)[None, :]
        # Beyond the columns, dy32 is 0; what xhat is there does not count.
        xhat = (x32 - m[:, None]) * s[:, None]
        g = dy32 * factor
        mean = tl.sum(g, axis=1) / COLUMNS
        slope = tl.sum(g * xhat, axis=1) / COLUMNS
        result = s[:, None] * (g - mean[:, None] - xhat * slope[:, None])
        if ADDED:
            result += addend.to(tl.float32)
        dx_place = dx + row[:, None] * (GROUPS * COLUMNS) + column[None, :]
        tl.store(dx_place, result.to(dx.dtype.element_ty), mask=kept)
        if TO_WEIGHT:
            total += dy32 * xhat.to(MIDDLE).to(tl.float32)
        if TO_BIAS:
            total_bias += dy32
    first = partial + tl.program_id(0).to(tl.int64) * ((TO_WEIGHT + TO_BIAS) * GROUPS * COLUMNS) + column
    if TO_WEIGHT:
        tl.store(first, tl.sum(total, axis=0), mask=inside)
    if TO_BIAS:
        tl.store(first + TO_WEIGHT * GROUPS * COLUMNS, tl.sum(total_bias, axis=0), mask=inside)
