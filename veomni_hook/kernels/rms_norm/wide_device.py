"""Device code of RMSNorm's backward for rows whose operands do not fit into registers beside their sums.

Formulas, shapes and strides are those of `veomni_hook.kernels.rms_norm.device`. Only the sums of dweight stay
in registers, of which they take half for a row of 32,768 values. A row is read twice, part by part: for
mean(g * xhat), and for dx, from the caches.
"""

import triton
import triton.language as tl

from veomni_hook.kernels.rms_norm.device import load_factor, row_begin

__all__ = ["LINE", "backward"]

#: Bytes that one prefetch brings into the L2 cache.
LINE = tl.constexpr(128)


@triton.jit
def _products(
    x_row, weight, dy_row, column, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, FACTOR: tl.constexpr
):
    """g * x of some columns of a row."""
    inside = column < COLUMNS
    x32 = tl.load(x_row + column, mask=inside, other=0.0).to(tl.float32)
    dy32 = tl.load(dy_row + column, mask=inside, other=0.0).to(tl.float32)
    return dy32 * load_factor(weight, column, inside, FACTOR, BLOCK) * x32


@triton.jit
def _prefetch(row, COLUMNS: tl.constexpr, LINES: tl.constexpr):
    """Start to bring a row into the L2 cache; LINES is a power of two that covers it."""
    size: tl.constexpr = row.dtype.element_ty.primitive_bitwidth // 8
    place = row + tl.minimum(tl.arange(0, LINES) * (LINE // size), COLUMNS - 1)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [place.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _finish(
    x_row,  # [COLUMNS]: a row of x
    weight,  # [COLUMNS]
    dy_row,  # [COLUMNS]: the row of dy
    direct_row,  # [COLUMNS]: the row of direct
    dx_row,  # [COLUMNS]: the row of dx
    column,  # [BLOCK]: the columns to finish
    mean,  # mean(g * xhat) of the row
    s,  # the row's scale
    total,  # [BLOCK]: the sum of dweight in the rows before
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    FACTOR: tl.constexpr,
    MIDDLE: tl.constexpr,
    ADDED: tl.constexpr,
    TO_WEIGHT: tl.constexpr,
):  # fmt: skip
    """Store dx of some columns of a row; return ``total`` with this row's part."""
    inside = column < COLUMNS
    x32 = tl.load(x_row + column, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
    dy32 = tl.load(dy_row + column, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
    g = dy32 * load_factor(weight, column, inside, FACTOR, BLOCK)
    xhat = x32 * s
    result = s * (g - xhat * mean)
    if ADDED:
        result += tl.load(direct_row + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(dx_row + column, result.to(dx_row.dtype.element_ty), mask=inside)
    if TO_WEIGHT:
        total += dy32 * xhat.to(MIDDLE).to(tl.float32)
    return total


@triton.jit(do_not_specialize=["rows"])
def backward(  # noqa: PLR0912, PLR0915 - Triton has no list that could hold the sums
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
    BLOCK: tl.constexpr,  # a power of two: columns of a part
    PARTS: tl.constexpr,  # of a row, at most eight
    LINES: tl.constexpr,  # a power of two: lines of memory that hold a row; 0: no row is fetched ahead
    FACTOR: tl.constexpr,
    MIDDLE: tl.constexpr,  # dtype
    ADDED: tl.constexpr,
    TO_WEIGHT: tl.constexpr,
):  # fmt: skip
    """dx = s * (g - xhat * mean(g * xhat)) [+ direct]; partial = sum over its rows of dy * xhat.to(MIDDLE).

    Grid: programs, each of which handles every programs-th row.
    """
    c = tl.arange(0, BLOCK)
    total_0 = tl.zeros([BLOCK], tl.float32)
    total_1 = tl.zeros([BLOCK], tl.float32)
    total_2 = tl.zeros([BLOCK], tl.float32)
    total_3 = tl.zeros([BLOCK], tl.float32)
    total_4 = tl.zeros([BLOCK], tl.float32)
    total_5 = tl.zeros([BLOCK], tl.float32)
    total_6 = tl.zeros([BLOCK], tl.float32)
    total_7 = tl.zeros([BLOCK], tl.float32)
    for number in tl.range(tl.program_id(0), rows, tl.num_programs(0)):
        row = number + tl.full((), 0, tl.int64)
        x_row = x + row_begin(row, size_x_1, size_x_2, stride_x_0, stride_x_1, stride_x_2)
        dy_row = dy + row_begin(row, size_dy_1, size_dy_2, stride_dy_0, stride_dy_1, stride_dy_2)
        direct_row = direct
        if ADDED:
            direct_row += row_begin(
                row, size_direct_1, size_direct_2, stride_direct_0, stride_direct_1, stride_direct_2
            )  # fmt: skip
        dx_row = dx + row * COLUMNS
        s = tl.load(scale + row)
        products = tl.zeros([BLOCK], tl.float32)
        for part in tl.static_range(0, PARTS):
            products += _products(x_row, weight, dy_row, part * BLOCK + c, COLUMNS, BLOCK, FACTOR)
        if LINES:
            after = tl.minimum(row + tl.num_programs(0), rows - 1)
            _prefetch(
                x + row_begin(after, size_x_1, size_x_2, stride_x_0, stride_x_1, stride_x_2), COLUMNS, LINES
            )
            _prefetch(
                dy + row_begin(after, size_dy_1, size_dy_2, stride_dy_0, stride_dy_1, stride_dy_2),
                COLUMNS,
                LINES,
            )
        mean = tl.sum(products, axis=0) * s / COLUMNS
        # Backwards: what was read last is still in the first cache.
        if PARTS > 7:
            total_7 = _finish(x_row, weight, dy_row, direct_row, dx_row, 7 * BLOCK + c, mean, s, total_7,
                              COLUMNS, BLOCK, FACTOR, MIDDLE, ADDED, TO_WEIGHT)  # fmt: skip
        if PARTS > 6:
            total_6 = _finish(x_row, weight, dy_row, direct_row, dx_row, 6 * BLOCK + c, mean, s, total_6,
                              COLUMNS, BLOCK, FACTOR, MIDDLE, ADDED, TO_WEIGHT)  # fmt: skip
        if PARTS > 5:
            total_5 = _finish(x_row, weight, dy_row, direct_row, dx_row, 5 * BLOCK + c, mean, s, total_5,
                              COLUMNS, BLOCK, FACTOR, MIDDLE, ADDED, TO_WEIGHT)  # fmt: skip
        if PARTS > 4:
            total_4 = _finish(x_row, weight, dy_row, direct_row, dx_row, 4 * BLOCK + c, mean, s, total_4,
                              COLUMNS, BLOCK, FACTOR, MIDDLE, ADDED, TO_WEIGHT)  # fmt: skip
        if PARTS > 3:
            total_3 = _finish(x_row, weight, dy_row, direct_row, dx_row, 3 * BLOCK + c, mean, s, total_3,
                              COLUMNS, BLOCK, FACTOR, MIDDLE, ADDED, TO_WEIGHT)  # fmt: skip
        if PARTS > 2:
            total_2 = _finish(x_row, weight, dy_row, direct_row, dx_row, 2 * BLOCK + c, mean, s, total_2,
                              COLUMNS, BLOCK, FACTOR, MIDDLE, ADDED, TO_WEIGHT)  # fmt: skip
        if PARTS > 1:
            total_1 = _finish(x_row, weight, dy_row, direct_row, dx_row, BLOCK + c, mean, s, total_1,
                              COLUMNS, BLOCK, FACTOR, MIDDLE, ADDED, TO_WEIGHT)  # fmt: skip
        total_0 = _finish(x_row, weight, dy_row, direct_row, dx_row, c, mean, s, total_0,
                          COLUMNS, BLOCK, FACTOR, MIDDLE, ADDED, TO_WEIGHT)  # fmt: skip
    if TO_WEIGHT:
        own = partial + tl.program_id(0).to(tl.int64) * COLUMNS + c
        tl.store(own, total_0, mask=c < COLUMNS)
        if PARTS > 1:
            tl.store(own + BLOCK, total_1, mask=BLOCK + c < COLUMNS)
        if PARTS > 2:
            tl.store(own + 2 * BLOCK, total_2, mask=2 * BLOCK + c < COLUMNS)
        if PARTS > 3:
            tl.store(own + 3 * BLOCK, total_3, mask=3 * BLOCK + c < COLUMNS)
        if PARTS > 4:
            tl.store(own + 4 * BLOCK, total_4, mask=4 * BLOCK + c < COLUMNS)
        if PARTS > 5:
            tl.store(own + 5 * BLOCK, total_5, mask=5 * BLOCK + c < COLUMNS)
        if PARTS > 6:
            tl.store(own + 6 * BLOCK, total_6, mask=6 * BLOCK + c < COLUMNS)
        if PARTS > 7:
            tl.store(own + 7 * BLOCK, total_7, mask=7 * BLOCK + c < COLUMNS)
