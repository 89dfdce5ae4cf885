"""Device code of RMSNorm's backward for rows whose operands do not fit into registers beside their sums.

Formulas, shapes and strides are those of `veomni_hook.kernels.rms_norm.device`. The sum of dweight stays in
registers, of which it takes half for a row of 32,768 values. A row is read twice: in chunks for
mean(g * xhat), which are loaded ahead, also while the row before is finished; then for dx, from the L2 cache.
"""

import triton
import triton.language as tl

from veomni_hook.kernels.rms_norm.device import load_factor, row_begin

__all__ = ["backward"]


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
def backward(
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
    HEAD: tl.constexpr,  # a power of two; with TAIL, a power of two, it holds COLUMNS
    TAIL: tl.constexpr,
    CHUNK: tl.constexpr,  # a power of two: columns per step
    FACTOR: tl.constexpr,
    MIDDLE: tl.constexpr,  # dtype
    ADDED: tl.constexpr,
    TO_WEIGHT: tl.constexpr,
    STAGES: tl.constexpr,  # loads in flight
):  # fmt: skip
    """dx = s * (g - xhat * mean(g * xhat)) [+ direct]; partial = sum over its rows of dy * xhat.to(MIDDLE).

    Grid: programs, each of which handles every programs-th row; at most one for each row.
    """
    CHUNKS: tl.constexpr = (COLUMNS + CHUNK - 1) // CHUNK
    head = tl.arange(0, HEAD)
    tail = HEAD + tl.arange(0, TAIL)
    total = tl.zeros([HEAD], tl.float32)
    total_of_tail = tl.zeros([TAIL], tl.float32)
    products = tl.zeros([CHUNK], tl.float32)
    first = tl.program_id(0)
    own = tl.cdiv(rows - first, tl.num_programs(0))
    # One loop for rows and chunks: loads ahead do not stop at the end of a row.
    for step in tl.range(0, own * CHUNKS, num_stages=STAGES):
        row = first + step // CHUNKS * tl.num_programs(0) + tl.full((), 0, tl.int64)
        x_row = x + row_begin(row, size_x_1, size_x_2, stride_x_0, stride_x_1, stride_x_2)
        dy_row = dy + row_begin(row, size_dy_1, size_dy_2, stride_dy_0, stride_dy_1, stride_dy_2)
        begin = step % CHUNKS * CHUNK
        column = begin + tl.arange(0, CHUNK)
        inside = column < COLUMNS
        x32 = tl.load(x_row + column, mask=inside, other=0.0).to(tl.float32)
        dy32 = tl.load(dy_row + column, mask=inside, other=0.0).to(tl.float32)
        products += dy32 * load_factor(weight, column, inside, FACTOR, CHUNK) * x32
        # Loads in a branch are not made ahead.
        if begin + CHUNK >= COLUMNS:
            s = tl.load(scale + row)
            mean = tl.sum(products, axis=0) * s / COLUMNS
            products = tl.zeros([CHUNK], tl.float32)
            direct_row = direct
            if ADDED:
                direct_row += row_begin(
                    row, size_direct_1, size_direct_2, stride_direct_0, stride_direct_1, stride_direct_2
                )  # fmt: skip
            dx_row = dx + row * COLUMNS
            total = _finish(
                x_row, weight, dy_row, direct_row, dx_row, head, mean, s, total,
                COLUMNS, HEAD, FACTOR, MIDDLE, ADDED, TO_WEIGHT,
            )  # fmt: skip
            total_of_tail = _finish(
                x_row, weight, dy_row, direct_row, dx_row, tail, mean, s, total_of_tail,
                COLUMNS, TAIL, FACTOR, MIDDLE, ADDED, TO_WEIGHT,
            )  # fmt: skip
    if TO_WEIGHT:
        partial_row = partial + tl.program_id(0).to(tl.int64) * COLUMNS
        tl.store(partial_row + head, total, mask=head < COLUMNS)
        tl.store(partial_row + tail, total_of_tail, mask=tail < COLUMNS)
