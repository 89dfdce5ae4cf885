"""Device code that joins two parts of heads; `veomni_hook.kernels.head_parts.triton` launches it."""

import triton
import triton.language as tl

__all__ = ["join"]


@triton.jit
def _copied(x, place, z, kept, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Copy the ``kept`` rows of x, which begin at ``place``, to those that begin at z."""
    column = tl.arange(0, BLOCK)
    inside = kept[:, None]
    if BLOCK != WIDTH:
        inside = inside & (column < WIDTH)[None, :]
    tl.store(z + column[None, :], tl.load(x + place[:, None] + column[None, :], mask=inside), mask=inside)


@triton.jit(do_not_specialize=["rows", "middle", "inner"])
def join(
    x,  # [outer, middle, inner, FIRST], strided, columns are neighbours
    y,  # [outer, middle, inner, SECOND], likewise
    z,  # [outer, middle, inner, FIRST + SECOND], contiguous: the result
    rows,  # outer * middle * inner
    middle,
    inner,
    stride_x_outer, stride_x_middle, stride_x_inner,
    stride_y_outer, stride_y_middle, stride_y_inner,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    FIRST_BLOCK: tl.constexpr,  # a power of two that holds FIRST
    SECOND_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,  # per program
):  # fmt: skip
    """z = [x | y]. Grid: cdiv(rows, ROWS)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    kept = row < rows
    third = (row % inner).to(tl.int64)
    second = (row // inner % middle).to(tl.int64)
    first = (row // inner // middle).to(tl.int64)
    begin = z + row.to(tl.int64)[:, None] * (FIRST + SECOND)
    place = first * stride_x_outer + second * stride_x_middle + third * stride_x_inner
    _copied(x, place, begin, kept, FIRST, FIRST_BLOCK)
    place = first * stride_y_outer + second * stride_y_middle + third * stride_y_inner
    _copied(y, place, begin + FIRST, kept, SECOND, SECOND_BLOCK)
