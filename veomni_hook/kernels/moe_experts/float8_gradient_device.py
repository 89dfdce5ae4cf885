"""Device code of the gradients of experts' weights in float8; `.triton_float8` launches it.

Backward: out_e = left' right over the rows of expert e, as in `.weight_gradient_device`
`.device` defines T, R, E and tiles; P and Q are the columns of the two factors. Hopper multiplies float8
along neighbours alone, so rows become columns first: those of tile m are the columns from ``m BM`` on, with
zeros where the expert has no more rows. W is ``max_tiles BM``. A row's scale would stand in the middle of the
sum: the other factor is multiplied by it.
"""

import triton
import triton.language as tl

from veomni_hook.kernels.float8.device import magnitude, scale_of
from veomni_hook.kernels.moe_experts.device import tile_at

__all__ = ["largest_of_experts", "turned", "weight_gradient"]


@triton.jit
def _tile(
    x, factors, tokens, tiles, max_tiles, columns, stride_x, m,
    BM: tl.constexpr, BC: tl.constexpr, GATHER: tl.constexpr,
):  # fmt: skip
    """A tile's expert and its numbers [BM, BC]: those of ``x``, times their rows' factors unless GATHER."""
    expert, first_row, end = (
        tl.load(tiles + m), tl.load(tiles + max_tiles + m), tl.load(tiles + 2 * max_tiles + m)
    )  # fmt: skip
    rows = first_row + tl.arange(0, BM)
    column = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = (rows < end)[:, None] & (column < columns)[None, :]
    token = tl.load(tokens + rows, mask=rows < end, other=0)
    if GATHER:
        values = tl.load(x + token.to(tl.int64)[:, None] * stride_x + column[None, :], mask=inside, other=0)
    else:
        values = tl.load(x + rows.to(tl.int64)[:, None] * stride_x + column[None, :], mask=inside, other=0.0)
        factor = tl.load(factors + token, mask=rows < end, other=0.0)
        values = tl.where(inside, values.to(tl.float32) * factor[:, None], 0.0)
    return expert, values


@triton.jit(do_not_specialize=["max_tiles"])
def largest_of_experts(
    x,  # [R, columns], D
    factors,  # [T], float32: of the rows of a token
    tokens,  # [R], int32: the token of a row
    tiles,  # [3 * max_tiles + 1], int32
    largest,  # [E, columns], int32, zeros before: the result, as `magnitude`
    max_tiles, columns, stride_x,
    BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The largest element of each column of an expert's rows. Grid: (max_tiles, cdiv(columns, BC))."""
    m = tl.program_id(0)
    if m < tl.load(tiles + 3 * max_tiles):
        expert, values = _tile(x, factors, tokens, tiles, max_tiles, columns, stride_x, m, BM, BC, False)
        column = tl.program_id(1) * BC + tl.arange(0, BC)
        of_tile = tl.max(magnitude(values), axis=0)
        tl.atomic_max(largest + expert.to(tl.int64) * columns + column, of_tile, mask=column < columns)


@triton.jit(do_not_specialize=["max_tiles"])
def turned(
    x,  # [R, columns], D; if GATHER [T, columns], float8 as bytes
    factors, tokens, tiles,  # as in `largest_of_experts`
    largest,  # [E, columns], int32, from `largest_of_experts`; not read if GATHER
    q,  # [columns, W], float8, or bytes if GATHER: the result
    scale,  # [E, columns], float32: the result; not written if GATHER
    max_tiles, columns, stride_x,
    BM: tl.constexpr, BC: tl.constexpr, GATHER: tl.constexpr,
):  # fmt: skip
    """Rows as columns, cast unless they are float8 already. Grid: (max_tiles, cdiv(columns, BC))."""
    m = tl.program_id(0)
    if m < tl.load(tiles + 3 * max_tiles):
        expert, values = _tile(x, factors, tokens, tiles, max_tiles, columns, stride_x, m, BM, BC, GATHER)
        column = tl.program_id(1) * BC + tl.arange(0, BC)
        exists = column < columns
        if not GATHER:
            of_expert = expert.to(tl.int64) * columns + column
            s, inverse = scale_of(tl.load(largest + of_expert, mask=exists, other=0))
            tl.store(scale + of_expert, s, mask=exists)  # the same number from all tiles of the expert
            values = values * inverse[None, :]
        place = m * BM + tl.arange(0, BM)
        pointers = q + column.to(tl.int64)[:, None] * (max_tiles * BM) + place[None, :]
        tl.store(pointers, tl.trans(values.to(q.dtype.element_ty)), mask=exists[:, None])


@triton.jit
def _slab(x, first_row, k, rows, width, BLOCK: tl.constexpr, BK: tl.constexpr, DESCRIBED: tl.constexpr):
    """A block [BLOCK, BK] of ``x`` [rows, width]."""
    if DESCRIBED:
        slab = x.load([first_row, k])
    else:
        row = first_row + tl.arange(0, BLOCK)
        pointers = x + row.to(tl.int64)[:, None] * width + k + tl.arange(0, BK)[None, :]
        slab = tl.load(pointers, mask=(row < rows)[:, None], other=0.0)
    return slab


@triton.jit(do_not_specialize=["max_tiles"])
def weight_gradient(
    left,  # [P, W], float8: a pointer or a descriptor
    right,  # [Q, W], float8: likewise
    scale,  # [E, P], or [E, Q] unless LEFT_SCALED, float32
    out,  # [E, P, Q], the weight's dtype: written
    experts,  # [4 E], int32: expert, first row, end and first tile of each, those with most rows first
    max_tiles, num_experts, p_columns, q_columns,
    BM: tl.constexpr, BP: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    STAGES: tl.constexpr, LEFT_SCALED: tl.constexpr, DESCRIBED: tl.constexpr,
    FLATTEN: tl.constexpr,
):  # fmt: skip
    """out_e = left' right over the rows of expert e; 0 without rows.

    Grid: (programs,) over experts and tiles of BP by BQ. BK divides BM.
    """
    p_tiles = tl.cdiv(p_columns, BP)
    q_tiles = tl.cdiv(q_columns, BQ)
    tiles_per_expert = p_tiles * q_tiles
    width = max_tiles.to(tl.int64) * BM
    for index in tl.range(
        tl.program_id(0), num_experts * tiles_per_expert, tl.num_programs(0), flatten=FLATTEN
    ):
        place = experts + index // tiles_per_expert
        expert = tl.load(place)
        p, q = tile_at(index % tiles_per_expert, p_tiles, q_tiles, GROUP)
        rows = tl.load(place + 2 * num_experts) - tl.load(place + num_experts)
        begin = tl.load(place + 3 * num_experts) * BM
        acc = tl.zeros([BP, BQ], tl.float32)
        for k in tl.range(begin, begin + tl.cdiv(rows, BM) * BM, BK, num_stages=STAGES):
            a = _slab(left, p * BP, k, p_columns, width, BP, BK, DESCRIBED)
            b = _slab(right, q * BQ, k, q_columns, width, BQ, BK, DESCRIBED)
            acc = tl.dot(a, tl.trans(b), acc)
        row, column = p * BP + tl.arange(0, BP), q * BQ + tl.arange(0, BQ)
        if LEFT_SCALED:
            s = tl.load(scale + expert.to(tl.int64) * p_columns + row, mask=row < p_columns, other=0.0)
            acc *= s[:, None]
        else:
            s = tl.load(scale + expert.to(tl.int64) * q_columns + column, mask=column < q_columns, other=0.0)
            acc *= s[None, :]
        out_pointers = out + (expert.to(tl.int64) * p_columns + row[:, None]) * q_columns + column[None, :]
        mask = (row < p_columns)[:, None] & (column < q_columns)[None, :]
        tl.store(out_pointers, acc.to(out.dtype.element_ty), mask=mask)
