"""Device code of a matrix product; `veomni_hook.batch_invariance.triton` launches it.

c = alpha * a @ b + beta * bias, summed in float32 along ``inner``, one slab after the other. How the sum of
one number is ordered depends on ``inner`` alone.
"""

import triton
import triton.language as tl

__all__ = ["product"]


@triton.jit(do_not_specialize=["rows"])
def product(
    a,  # [batch, rows, inner] with strides; if A_DESCRIBED a descriptor, [inner, rows] if A_TURNED
    b,  # [batch, inner, columns] with strides; if B_DESCRIBED a descriptor, [columns, inner] if B_TURNED
    c,  # [batch, rows, columns], contiguous: the result
    bias,  # [batch, rows, columns] with strides, which may be 0; read if BIASED
    rows, columns, inner,
    stride_a_batch, stride_a_row, stride_a_inner,
    stride_b_batch, stride_b_inner, stride_b_column,
    stride_bias_batch, stride_bias_row, stride_bias_column,
    alpha, beta,  # float32
    A_DESCRIBED: tl.constexpr, A_TURNED: tl.constexpr,
    B_DESCRIBED: tl.constexpr, B_TURNED: tl.constexpr,
    BIASED: tl.constexpr,
    PRECISION: tl.constexpr,  # of products of float32: "ieee" or "tf32"
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    GROUP: tl.constexpr,  # tiles of rows that use one tile of columns before the next
    STAGES: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """Grid: (programs, batch). Programs loop over tiles."""
    batch = tl.program_id(1).to(tl.int64)
    down, across = tl.cdiv(rows, ROWS), tl.cdiv(columns, COLUMNS)
    for tile in tl.range(tl.program_id(0), down * across, tl.num_programs(0), flatten=FLATTEN):
        group = tile // (GROUP * across)
        within = tile % (GROUP * across)
        height = tl.minimum(down - group * GROUP, GROUP)
        first_row = (group * GROUP + within % height) * ROWS
        first_column = (within // height) * COLUMNS
        row = first_row + tl.arange(0, ROWS).to(tl.int64)
        column = first_column + tl.arange(0, COLUMNS).to(tl.int64)
        lane = tl.arange(0, DEPTH).to(tl.int64)
        total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for k in tl.range(0, inner, DEPTH, num_stages=STAGES):
            if A_DESCRIBED:
                left = a.load([k, first_row]).T if A_TURNED else a.load([first_row, k])
            else:
                left = tl.load(
                    a
                    + batch * stride_a_batch
                    + row[:, None] * stride_a_row
                    + (k + lane)[None, :] * stride_a_inner,
                    mask=(row[:, None] < rows) & (lane[None, :] < inner - k),
                    other=0.0,
                )
            if B_DESCRIBED:
                right = b.load([first_column, k]).T if B_TURNED else b.load([k, first_column])
            else:
                right = tl.load(
                    b
                    + batch * stride_b_batch
                    + (k + lane)[:, None] * stride_b_inner
                    + column[None, :] * stride_b_column,
                    mask=(lane[:, None] < inner - k) & (column[None, :] < columns),
                    other=0.0,
                )
            total = tl.dot(left, right, total, input_precision=PRECISION)
        inside = (row[:, None] < rows) & (column[None, :] < columns)
        total *= alpha
        if BIASED:
            term = tl.load(
                bias
                + batch * stride_bias_batch
                + row[:, None] * stride_bias_row
                + column[None, :] * stride_bias_column,
                mask=inside,
                other=0.0,
            )
            total += beta * term.to(tl.float32)
        out = c + batch * rows * columns + row[:, None] * columns + column[None, :]
        tl.store(out, total.to(c.dtype.element_ty), mask=inside)
