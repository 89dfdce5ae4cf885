"""Device code of merged and added rows; `veomni_hook.kernels.row_merge.triton` launches it.

``counts[r]`` is the number of set elements of the mask up to r: row r is at the mask if it differs from
``counts[r - 1]``, and then takes row ``counts[r] - 1`` of the source.

Forward:  y[r] = source[counts[r] - 1] (+ x[r] if ADDED) at the mask, else x[r]
Backward: dx[r] = 0 at the mask, else dy[r];  dsource[counts[r] - 1] = dy[r] at the mask, the rest 0
"""

import triton
import triton.language as tl

__all__ = ["backward", "forward"]


@triton.jit
def _place(counts, row, exists):
    """Whether a row is at the mask, and its row of the source."""
    count = tl.load(counts + row, mask=exists, other=0)
    before = tl.load(counts + row - 1, mask=exists & (row > 0), other=0)
    return count != before, count.to(tl.int64) - 1


@triton.jit(do_not_specialize=["source_rows"])
def forward(
    x,  # [rows, COLUMNS]
    source,  # [source_rows, COLUMNS], the dtype of x
    counts,  # [rows], int32
    y,  # [rows, COLUMNS], the dtype of x: a result
    source_rows,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,  # a power of two
    ADDED: tl.constexpr,
):
    """Rows at the mask come from the source, or are its sum with x. Grid: rows, cdiv(COLUMNS, BLOCK)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < COLUMNS
    chosen, place = _place(counts, row, row >= 0)
    # Too few rows: the assertion of the host code says so.
    taken = chosen & (place < source_rows)
    new = tl.load(source + place * COLUMNS + column, mask=inside & taken, other=0.0)
    old = tl.load(x + row * COLUMNS + column, mask=inside & (not chosen or ADDED), other=0.0)
    if ADDED:
        total = (old.to(tl.float32) + new.to(tl.float32)).to(y.dtype.element_ty)
        result = tl.where(chosen, total, old)
    else:
        result = tl.where(chosen, new, old)
    tl.store(y + row * COLUMNS + column, result, mask=inside)


@triton.jit(do_not_specialize=["rows", "source_rows"])
def backward(
    dy,  # [rows, COLUMNS]
    counts,  # [rows], int32
    dx,  # [rows, COLUMNS], the dtype of dy: a result, if TO_X
    dsource,  # [source_rows, COLUMNS], the dtype of dy: a result, if TO_SOURCE
    rows,
    source_rows,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,  # a power of two
    TO_X: tl.constexpr,
    TO_SOURCE: tl.constexpr,
):
    """The gradients of merged rows. Grid: max(rows, source_rows), cdiv(COLUMNS, BLOCK)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < COLUMNS
    exists = row < rows
    chosen, place = _place(counts, row, exists)
    g = tl.load(dy + row * COLUMNS + column, mask=inside & exists, other=0.0)
    if TO_X:
        tl.store(dx + row * COLUMNS + column, tl.where(chosen, 0.0, g), mask=inside & exists)
    if TO_SOURCE:
        taken = chosen & (place < source_rows)
        tl.store(dsource + place * COLUMNS + column, g, mask=inside & taken)
        unused = (row < source_rows) & (row >= tl.load(counts + rows - 1))
        tl.store(dsource + row * COLUMNS + column, tl.zeros_like(g), mask=inside & unused)
