"""Device code of the gradients of experts' weights.

`veomni_hook.kernels.moe_experts.triton_products` launches it; `.device` defines T, R, E and D.

Backward: dD_e = (w h)' dout[token];  dU_e = x[token]' [dg, du];  transposed where weights are [E, out, in]
Shapes: P and Q are the columns of the two factors. Sums are in float32.
"""

import triton
import triton.language as tl

from veomni_hook.kernels.moe_experts.device import tile_at

__all__ = ["weight_gradient"]


@triton.jit
def _slab(
    x,  # a pointer to rows of ``columns`` numbers
    described,  # a descriptor of the same rows if DESCRIBED; not used in the LAST slab
    begin, end, first_column, tokens, stride_x_row, columns,
    GATHER: tl.constexpr, DESCRIBED: tl.constexpr, EVEN: tl.constexpr, LAST: tl.constexpr,
    BK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A block [BK, BLOCK] of the rows from ``begin`` on and the columns from ``first_column`` on.

    In the ``LAST`` slab, rows from ``end`` on are zeroed: they hold another expert's numbers, or garbage.
    """
    if DESCRIBED and not LAST:
        slab = described.load([begin, first_column])
    else:
        rows = begin + tl.arange(0, BK)
        column = first_column + tl.arange(0, BLOCK)
        row_mask = begin + tl.arange(0, BK) < end
        if GATHER:
            if LAST:
                rows = tl.load(tokens + rows, mask=row_mask, other=0)
            else:
                rows = tl.load(tokens + rows)
        pointers = x + rows.to(tl.int64)[:, None] * stride_x_row + column[None, :]
        if LAST:
            slab = tl.load(pointers, mask=row_mask[:, None] & (column < columns)[None, :], other=0.0)
        elif EVEN:
            slab = tl.load(pointers)
        else:
            slab = tl.load(pointers, mask=(column < columns)[None, :], other=0.0)
    return slab


@triton.jit
def weight_gradient(
    left,  # [R, P], or [T, P] if LEFT_GATHER, D
    left_described,  # a descriptor of ``left`` if LEFT_DESCRIBED
    right,  # [R, Q], or [T, Q] if RIGHT_GATHER, D
    right_described,  # a descriptor of ``right`` if RIGHT_DESCRIBED
    out,  # [E, P, Q], the weight's dtype: written
    tokens,  # [R], int32: the token of a row; read if one side is gathered
    experts,  # [4 E], int32: expert, first row, end and first tile of each, those with most rows first
    num_experts, p_columns, q_columns,  # E, P, Q
    stride_left_row, stride_right_row,
    BP: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
    LEFT_GATHER: tl.constexpr, RIGHT_GATHER: tl.constexpr, LEFT_DESCRIBED: tl.constexpr,
    RIGHT_DESCRIBED: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """out_e = left' right over the rows of expert e; 0 without rows. At most one side is gathered.

    Grid: (programs,) over experts and tiles of BP by BQ; BK is the number of rows at once.
    """
    p_tiles = tl.cdiv(p_columns, BP)
    q_tiles = tl.cdiv(q_columns, BQ)
    tiles_per_expert = p_tiles * q_tiles
    for index in tl.range(tl.program_id(0), num_experts * tiles_per_expert, tl.num_programs(0)):
        place = experts + index // tiles_per_expert
        expert = tl.load(place)
        p, q = tile_at(index % tiles_per_expert, p_tiles, q_tiles, GROUP)
        begin, end = tl.load(place + num_experts), tl.load(place + 2 * num_experts)
        last = begin + (end - begin) // BK * BK
        acc = tl.zeros([BP, BQ], tl.float32)
        for k in tl.range(begin, last, BK, num_stages=STAGES):
            a = _slab(
                left, left_described, k, end, p * BP, tokens, stride_left_row, p_columns,
                LEFT_GATHER, LEFT_DESCRIBED, EVEN, False, BK, BP,
            )  # fmt: skip
            b = _slab(
                right, right_described, k, end, q * BQ, tokens, stride_right_row, q_columns,
                RIGHT_GATHER, RIGHT_DESCRIBED, EVEN, False, BK, BQ,
            )  # fmt: skip
            acc = tl.dot(tl.trans(a), b, acc, input_precision="ieee")
        if last < end:
            a = _slab(
                left, left_described, last, end, p * BP, tokens, stride_left_row, p_columns,
                LEFT_GATHER, LEFT_DESCRIBED, EVEN, True, BK, BP,
            )  # fmt: skip
            b = _slab(
                right, right_described, last, end, q * BQ, tokens, stride_right_row, q_columns,
                RIGHT_GATHER, RIGHT_DESCRIBED, EVEN, True, BK, BQ,
            )  # fmt: skip
            acc = tl.dot(tl.trans(a), b, acc, input_precision="ieee")
        row = (p * BP + tl.arange(0, BP))[:, None]
        column = (q * BQ + tl.arange(0, BQ))[None, :]
        out_pointers = out + (expert.to(tl.int64) * p_columns + row) * q_columns + column
        tl.store(out_pointers, acc.to(out.dtype.element_ty), mask=(row < p_columns) & (column < q_columns))
