"""Device code that casts matrices to float8 (e4m3); `veomni_hook.kernels.float8.triton` launches it.

q = (x / s).to(float8), where s = 2^k is the smallest power of two with |x| <= 448 s along a row, or along a
column, or in MX of 32 neighbours (`reference`). The largest |x| is found among the bits of float32, which are
ordered as the numbers are, and where infinities and NaN come last: no maximum drops them, and their scale is
NaN.
"""

import triton
import triton.language as tl

__all__ = ["cast_columns", "cast_rows", "cast_to_mx", "largest_of_columns", "store_in_mx", "turn"]


@triton.jit
def magnitude(x):
    """The bits of |x| in float32, as integers."""
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def larger(most, x):
    """The larger of two sizes, or NaN: one instruction, where `magnitude` and a maximum are two."""
    return tl.maximum(most, tl.abs(x), propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def scale_of(largest):
    """s and 1 / s for the `magnitude` of the largest element, which counts as 2^-100 where it is less."""
    infinite = 0x7F800000
    bits = tl.minimum(tl.maximum(largest, 27 << 23), infinite)
    # 448 = 1.75 * 2^8: a mantissa above 1.75 carries into the exponent.
    exponent = ((bits + 0x1FFFFF) >> 23) - 8
    nan = tl.full(largest.shape, float("nan"), tl.float32)
    scale = tl.where(bits < infinite, (exponent << 23).to(tl.float32, bitcast=True), nan)
    inverse = tl.where(bits < infinite, ((254 - exponent) << 23).to(tl.float32, bitcast=True), nan)
    return scale, inverse


@triton.jit(do_not_specialize=["rows"])
def cast_rows(
    x,  # [rows, COLUMNS], the columns are neighbours: float32, bfloat16 or float16
    q,  # [rows, COLUMNS], float8: the result
    scale,  # [rows], float32: the result
    rows,
    stride_x,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,  # a power of two
):
    """A scale for each row. Grid: rows."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    if COLUMNS <= BLOCK:
        inside = column < COLUMNS
        values = tl.load(x + row * stride_x + column, mask=inside, other=0.0)
        s, inverse = scale_of(tl.max(magnitude(values), axis=0, keep_dims=True))
        values = values.to(tl.float32) * inverse
        tl.store(q + row * COLUMNS + column, values.to(q.dtype.element_ty), mask=inside)
    else:
        largest = tl.zeros([BLOCK], tl.int32)
        for first in range(0, COLUMNS, BLOCK):
            inside = first + column < COLUMNS
            values = tl.load(x + row * stride_x + first + column, mask=inside, other=0.0)
            largest = tl.maximum(largest, magnitude(values))
        s, inverse = scale_of(tl.max(largest, axis=0, keep_dims=True))
        for first in range(0, COLUMNS, BLOCK):
            inside = first + column < COLUMNS
            values = tl.load(x + row * stride_x + first + column, mask=inside, other=0.0)
            values = values.to(tl.float32) * inverse
            tl.store(q + row * COLUMNS + first + column, values.to(q.dtype.element_ty), mask=inside)
    tl.store(scale + row + tl.arange(0, 1), s)


@triton.jit
def largest_of_columns(
    x,  # [matrices, rows, columns], the columns are neighbours
    factors,  # [rows], float32: x is multiplied by them first, if FACTORS
    largest,  # [matrices, columns], int32, zeros before: the result, as `magnitude`
    rows,
    columns,
    stride_x_matrix,
    stride_x,
    ROWS: tl.constexpr,  # of a block
    COLUMNS: tl.constexpr,
    BLOCKS: tl.constexpr,  # per program, one below the other
    STAGES: tl.constexpr,  # blocks that are on their way
    FACTORS: tl.constexpr,
):
    """Grid: (cdiv(rows, ROWS * BLOCKS), cdiv(columns, COLUMNS), matrices)."""
    matrix = tl.program_id(2).to(tl.int64)
    x += matrix * stride_x_matrix
    largest += matrix * columns
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    first = tl.program_id(0) * ROWS * BLOCKS + tl.arange(0, ROWS)
    most = tl.zeros([ROWS, COLUMNS], tl.float32)
    for block in tl.range(BLOCKS, num_stages=STAGES):
        row = (first + block * ROWS).to(tl.int64)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        values = tl.load(x + row[:, None] * stride_x + column[None, :], mask=inside, other=0.0)
        values = values.to(tl.float32)
        if FACTORS:
            values *= tl.load(factors + row, mask=row < rows, other=0.0)[:, None]
        most = larger(most, values)
    most = tl.max(magnitude(most), axis=0)
    tl.atomic_max(largest + column, most, mask=column < columns, sem="relaxed")


@triton.jit
def cast_columns(
    x,  # [matrices, rows, columns], the columns are neighbours
    factors,  # as in `largest_of_columns`
    largest,  # [matrices, columns], int32, from `largest_of_columns`
    q,  # [matrices, columns, rows], float8: the result, transposed
    scale,  # [matrices, columns], float32: the result
    rows,
    columns,
    stride_x_matrix,
    stride_x,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FACTORS: tl.constexpr,
):
    """A scale for each column. Grid: (cdiv(rows, ROWS), cdiv(columns, COLUMNS), matrices)."""
    matrix = tl.program_id(2).to(tl.int64)
    x += matrix * stride_x_matrix
    largest += matrix * columns
    q += matrix * columns * rows
    scale += matrix * columns
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    s, inverse = scale_of(tl.load(largest + column, mask=column < columns, other=0))
    values = tl.load(x + row[:, None] * stride_x + column[None, :], mask=inside, other=0.0)
    values = values.to(tl.float32)
    if FACTORS:
        values *= tl.load(factors + row, mask=row < rows, other=0.0)[:, None]
    turned = tl.trans((values * inverse[None, :]).to(q.dtype.element_ty))
    within = (column < columns)[:, None] & (row < rows)[None, :]
    tl.store(q + column[:, None].to(tl.int64) * rows + row[None, :], turned, mask=within)
    if tl.program_id(0) == 0:
        tl.store(scale + column, s, mask=column < columns)


@triton.jit
def turn(
    x,  # [rows, columns], bytes, contiguous
    y,  # [columns, rows], bytes: the result
    rows,
    columns,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The transpose. Grid: (cdiv(rows, ROWS), cdiv(columns, COLUMNS))."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    values = tl.load(x + row[:, None] * columns + column[None, :], mask=inside, other=0)
    tl.store(y + column[:, None] * rows + row[None, :], tl.trans(values), mask=tl.trans(inside))


@triton.jit
def _in_mx(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The tile ``x`` [ROWS, COLUMNS] in float8, and the bytes of its scales, [ROWS, COLUMNS / 32]."""
    parts = tl.reshape(x, (ROWS, COLUMNS // 32, 32))
    s, inverse = scale_of(tl.max(magnitude(parts), axis=2))
    values = tl.reshape(parts.to(tl.float32) * inverse[:, :, None], (ROWS, COLUMNS))
    return values.to(tl.float8e4nv), ((s.to(tl.int32, bitcast=True) >> 23) & 255).to(tl.uint8)


@triton.jit
def store_in_mx(x, q, scale, row, first, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Store the tile ``x`` as the columns from ``first`` on of the rows ``row`` [ROWS] of ``q``."""
    values, exponents = _in_mx(x, ROWS, COLUMNS)
    parts = tl.cdiv(columns, 32)
    column = first + tl.arange(0, COLUMNS)
    part = first // 32 + tl.arange(0, COLUMNS // 32)
    exists = (row < rows)[:, None]
    row = row.to(tl.int64)[:, None]
    tl.store(q + row * columns + column[None, :], values, mask=exists & (column < columns)[None, :])
    tl.store(scale + row * parts + part[None, :], exponents, mask=exists & (part < parts)[None, :])


@triton.jit
def cast_to_mx(
    x,  # [matrices, rows, columns], the columns are neighbours: float32, bfloat16 or float16
    q,  # [matrices, rows, columns], float8: the result; if TURNED [matrices, columns, rows]
    scale,  # [.., cdiv(neighbours, 32)], bytes: the result
    rows,
    columns,
    stride_x_matrix,
    stride_x,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TURNED: tl.constexpr,
):
    """A scale for 32 neighbours of the result. Grid: (cdiv(rows, ROWS), cdiv(columns, COLUMNS), matrices)."""
    matrix = tl.program_id(2).to(tl.int64)
    first_row, first_column = tl.program_id(0) * ROWS, tl.program_id(1) * COLUMNS
    row, column = first_row + tl.arange(0, ROWS), first_column + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    pointers = x + matrix * stride_x_matrix + row.to(tl.int64)[:, None] * stride_x + column[None, :]
    values = tl.load(pointers, mask=inside, other=0.0)
    q += matrix * rows * columns
    if TURNED:
        scale += matrix * columns * tl.cdiv(rows, 32)
        store_in_mx(tl.trans(values), q, scale, column, first_row, columns, rows, COLUMNS, ROWS)
    else:
        scale += matrix * rows * tl.cdiv(columns, 32)
        store_in_mx(values, q, scale, row, first_column, rows, columns, ROWS, COLUMNS)
