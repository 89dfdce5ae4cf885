"""Device code of RMSNorm, and what its relatives share; `veomni_hook.kernels.rms_norm.triton` launches it.

Forward:  s = rsqrt(mean(x^2) + eps),  xhat = x * s,  y = factor * xhat.to(MIDDLE), in float32
Backward: dx = s * (g - xhat * mean(g * xhat)), g = factor * dy
          dweight = sum over rows of dy * xhat.to(MIDDLE)
Shapes: x, y [rows, COLUMNS], weight [COLUMNS], each in float32, bfloat16 or float16. The rows of a strided
tensor T have three dimensions, ``[.., size_T_1, size_T_2]``, and the strides ``stride_T_0`` to ``stride_T_2``
(`veomni_hook.kernels.shared.rows.Rows`); their columns are neighbours. Other tensors are contiguous.

``factor`` is numbered by FACTOR, see `load_factor`. A program handles ROWS rows at once. Parameters are not
grouped but ordered by tensor: Triton 3.2, the oldest supported release, takes no named tuples.
"""

import triton
import triton.language as tl

__all__ = ["add_up", "backward", "forward", "inverse_rms", "load_factor", "row_begin", "through_norm"]


@triton.jit
def row_begin(row, size_1, size_2, stride_0, stride_1, stride_2):
    """Where the rows with these numbers begin in a strided tensor."""
    outer = row // size_2
    return outer // size_1 * stride_0 + outer % size_1 * stride_1 + row % size_2 * stride_2


@triton.jit
def load_factor(weight, column, inside, FACTOR: tl.constexpr, BLOCK: tl.constexpr):
    """1, weight, 1 + weight, or that sum rounded to the weight's dtype (FACTOR 0 to 3); float32 [BLOCK]."""
    if FACTOR == 0:
        factor = tl.full([BLOCK], 1.0, tl.float32)
    else:
        stored = tl.load(weight + column, mask=inside, other=0.0)
        factor = stored.to(tl.float32)
        if FACTOR == 2:
            factor = 1.0 + factor
        if FACTOR == 3:
            factor = (1.0 + factor).to(stored.dtype).to(tl.float32)
    return factor


@triton.jit
def inverse_rms(z, eps, COLUMNS: tl.constexpr):
    """rsqrt(mean(z^2) + eps) of each row of z, float32, which is 0 beyond its columns."""
    return tl.rsqrt(tl.sum(z * z, axis=1) / COLUMNS + eps)


@triton.jit
def through_norm(g, zhat, mean, s):
    """The gradient of z from ``g``, that of ``zhat = z * s``, and ``mean(g * zhat)`` of each row."""
    return s[:, None] * (g - zhat * mean[:, None])


@triton.jit(do_not_specialize=["rows"])
def forward(
    x,  # [rows, COLUMNS], strided: the input
    weight,  # [COLUMNS]; not read if FACTOR is 0
    y,  # [rows, COLUMNS]: the result
    scale,  # [rows], float32: the result s; not written unless KEEP
    rows,
    size_x_1, size_x_2, stride_x_0, stride_x_1, stride_x_2,
    eps,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,  # a power of two that holds COLUMNS
    ROWS: tl.constexpr,  # per program
    FACTOR: tl.constexpr,
    MIDDLE: tl.constexpr,  # dtype
    KEEP: tl.constexpr,  # whether a backward needs the scale
):  # fmt: skip
    """y = factor * (x * s).to(MIDDLE). Grid: cdiv(rows, ROWS)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < COLUMNS
    kept = (row < rows)[:, None] & inside[None, :]
    x_begin = row_begin(row, size_x_1, size_x_2, stride_x_0, stride_x_1, stride_x_2)
    x32 = tl.load(x + x_begin[:, None] + column[None, :], mask=kept, other=0.0).to(tl.float32)
    factor = load_factor(weight, column, inside, FACTOR, BLOCK)
    s = inverse_rms(x32, eps, COLUMNS)
    result = (x32 * s[:, None]).to(MIDDLE).to(tl.float32) * factor[None, :]
    tl.store(y + row[:, None] * COLUMNS + column[None, :], result.to(y.dtype.element_ty), mask=kept)
    if KEEP:
        tl.store(scale + row, s, mask=row < rows)


@triton.jit(do_not_specialize=["rows"])
def backward(  # noqa: PLR0912, PLR0915 - Triton has no list that could hold the blocks of a row
    x,  # [rows, COLUMNS], strided: the forward's input
    weight,  # [COLUMNS]; not read if FACTOR is 0
    scale,  # [rows], float32: the forward's s
    dy,  # [rows, COLUMNS], strided: the gradient of y
    direct,  # [rows, COLUMNS], strided: another gradient of x, which is added to dx; not read unless ADDED
    dx,  # [rows, COLUMNS], the dtype of x: the result
    partial,  # [programs, COLUMNS], float32: each program's part of dweight; not written unless TO_WEIGHT
    rows,
    size_x_1, size_x_2, stride_x_0, stride_x_1, stride_x_2,
    size_dy_1, size_dy_2, stride_dy_0, stride_dy_1, stride_dy_2,
    size_direct_1, size_direct_2, stride_direct_0, stride_direct_1, stride_direct_2,
    COLUMNS: tl.constexpr,
    HEAD: tl.constexpr,  # a power of two; with TAIL, 0 or a power of two, it holds COLUMNS
    TAIL: tl.constexpr,
    ROWS: tl.constexpr,  # per step of a program
    FACTOR: tl.constexpr,
    MIDDLE: tl.constexpr,  # dtype
    ADDED: tl.constexpr,
    TO_WEIGHT: tl.constexpr,
    STAGES: tl.constexpr,  # loads in flight
):  # fmt: skip
    """dx = s * (g - xhat * mean(g * xhat)) [+ direct]; partial = sum over its rows of dy * xhat.to(MIDDLE).

    Grid: programs, each of which handles every programs-th block of ROWS rows.
    """
    column = tl.arange(0, HEAD)
    inside = column < COLUMNS
    factor = load_factor(weight, column, inside, FACTOR, HEAD)
    total = tl.zeros([ROWS, HEAD], tl.float32)
    if TAIL:
        column_of_tail = HEAD + tl.arange(0, TAIL)
        inside_of_tail = column_of_tail < COLUMNS
        factor_of_tail = load_factor(weight, column_of_tail, inside_of_tail, FACTOR, TAIL)
        total_of_tail = tl.zeros([ROWS, TAIL], tl.float32)
    for block in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = block * ROWS + tl.arange(0, ROWS).to(tl.int64)
        exists = (row < rows)[:, None]
        kept = exists & inside[None, :]
        x_begin = row_begin(row, size_x_1, size_x_2, stride_x_0, stride_x_1, stride_x_2)[:, None]
        dy_begin = row_begin(row, size_dy_1, size_dy_2, stride_dy_0, stride_dy_1, stride_dy_2)[:, None]
        dx_row = dx + row[:, None] * COLUMNS
        x32 = tl.load(x + x_begin + column[None, :], mask=kept, other=0.0).to(tl.float32)
        dy32 = tl.load(dy + dy_begin + column[None, :], mask=kept, other=0.0).to(tl.float32)
        if ADDED:
            direct_row = direct + row_begin(
                row, size_direct_1, size_direct_2, stride_direct_0, stride_direct_1, stride_direct_2
            )[:, None]  # fmt: skip
            addend = tl.load(direct_row + column[None, :], mask=kept, other=0.0)
        if TAIL:
            kept_of_tail = exists & inside_of_tail[None, :]
            at_tail = column_of_tail[None, :]
            x_of_tail = tl.load(x + x_begin + at_tail, mask=kept_of_tail, other=0.0).to(tl.float32)
            dy_of_tail = tl.load(dy + dy_begin + at_tail, mask=kept_of_tail, other=0.0).to(tl.float32)
            if ADDED:
                addend_of_tail = tl.load(direct_row + at_tail, mask=kept_of_tail, other=0.0)
        s = tl.load(scale + row, mask=row < rows, other=0.0)
        xhat = x32 * s[:, None]
        g = dy32 * factor[None, :]
        product = tl.sum(g * xhat, axis=1)
        if TAIL:
            xhat_of_tail = x_of_tail * s[:, None]
            g_of_tail = dy_of_tail * factor_of_tail[None, :]
            product += tl.sum(g_of_tail * xhat_of_tail, axis=1)
        mean = product / COLUMNS
        result = through_norm(g, xhat, mean, s)
        if ADDED:
            result += addend.to(tl.float32)
        tl.store(dx_row + column[None, :], result.to(dx.dtype.element_ty), mask=kept)
        if TAIL:
            result_of_tail = through_norm(g_of_tail, xhat_of_tail, mean, s)
            if ADDED:
                result_of_tail += addend_of_tail.to(tl.float32)
            tl.store(dx_row + at_tail, result_of_tail.to(dx.dtype.element_ty), mask=kept_of_tail)
        if TO_WEIGHT:
            total += dy32 * xhat.to(MIDDLE).to(tl.float32)
            if TAIL:
                total_of_tail += dy_of_tail * xhat_of_tail.to(MIDDLE).to(tl.float32)
    if TO_WEIGHT:
        partial_row = partial + tl.program_id(0).to(tl.int64) * COLUMNS
        tl.store(partial_row + column, tl.sum(total, axis=0), mask=inside)
        if TAIL:
            tl.store(partial_row + column_of_tail, tl.sum(total_of_tail, axis=0), mask=inside_of_tail)


@triton.jit(do_not_specialize=["count"])
def add_up(
    partial,  # [count, COLUMNS], float32
    total,  # [COLUMNS]: the result
    count,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,  # columns per program
    ROWS: tl.constexpr,  # per step of a program
):  # fmt: skip
    """total = sum over the rows of ``partial``, in float32 and a fixed order. Grid: cdiv(COLUMNS, BLOCK)."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < COLUMNS
    sums = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in range(0, count, ROWS):
        row = first + tl.arange(0, ROWS)
        place = row[:, None] * COLUMNS + column[None, :]
        sums += tl.load(partial + place, mask=(row < count)[:, None] & inside[None, :], other=0.0)
    tl.store(total + column, tl.sum(sums, axis=0).to(total.dtype.element_ty), mask=inside)
