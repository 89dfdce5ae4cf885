"""Device code of the gradients of experts' weights in float8; `.triton_float8` launches it.

Backward: out_e = left' right over the rows of expert e, as in `.weight_gradient_device`
`.device` defines T, R, E and tiles; P and Q are the columns of the two factors. Hopper multiplies float8
along neighbours alone, so rows become columns first: those of tile m are the columns from ``m BM`` on, with
zeros where the expert has no more rows. W is ``max_tiles BM``. A row's scale would stand in the middle of the
sum: the other factor is multiplied by it. In MX (`veomni_hook.kernels.float8.reference`), 32 of those columns
share a scale, and no factor needs the other's.
"""

import triton
import triton.language as tl

from veomni_hook.kernels.float8.device import store_in_mx
from veomni_hook.kernels.moe_experts.device import read_tile, scales, tile_at

__all__ = ["turned", "turned_to_mx", "weight_gradient", "write_columns"]


@triton.jit
def write_columns(q, packed, column, exists, m, max_tiles, QUARTER: tl.constexpr):
    """Write tile m, four rows' bytes a number, [QUARTER, columns], into rows of ``q`` [.., W], float8."""
    place = m * QUARTER + tl.arange(0, QUARTER)
    words = q.to(tl.pointer_type(tl.int32), bitcast=True)
    pointers = words + column.to(tl.int64)[:, None] * (max_tiles.to(tl.int64) * QUARTER) + place[None, :]
    tl.store(pointers, tl.trans(packed).to(tl.int32, bitcast=True), mask=exists[:, None])


@triton.jit(do_not_specialize=["max_tiles"])
def turned(
    x,  # [T, columns], float8 as bytes
    tokens,  # [R], int32: the token of a row
    tiles,  # [3 * max_tiles + 1], int32
    q,  # [columns, W], float8: the result
    max_tiles, columns, stride_x,
    BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Rows of tokens as columns. Grid: (max_tiles, cdiv(columns, BC))."""
    QUARTER: tl.constexpr = BM // 4
    m = tl.program_id(0)
    if m < tl.load(tiles + 3 * max_tiles):
        _, first_row, end = read_tile(tiles, max_tiles, m)
        first = first_row + 4 * tl.arange(0, QUARTER)
        column = tl.program_id(1) * BC + tl.arange(0, BC)
        packed = tl.zeros([QUARTER, BC], tl.uint32)
        for part in tl.static_range(4):
            token = tl.load(tokens + first + part, mask=first + part < end, other=0)
            inside = (first + part < end)[:, None] & (column < columns)[None, :]
            bits = tl.load(x + token.to(tl.int64)[:, None] * stride_x + column[None, :], mask=inside, other=0)
            packed |= bits.to(tl.uint32) << (8 * part)
        write_columns(q, packed, column, column < columns, m, max_tiles, QUARTER)


@triton.jit(do_not_specialize=["max_tiles"])
def turned_to_mx(
    x,  # [T, columns], or [R, columns] unless GATHERED, D
    tokens,  # [R], int32: the token of a row
    tiles,  # [3 * max_tiles + 1], int32
    q,  # [columns, W], float8: the result
    scale,  # [columns, W / 32], bytes: the result
    max_tiles, columns, stride_x,
    BM: tl.constexpr, BC: tl.constexpr, GATHERED: tl.constexpr,
):  # fmt: skip
    """Rows as columns in MX. Grid: (max_tiles, cdiv(columns, BC))."""
    m = tl.program_id(0)
    if m < tl.load(tiles + 3 * max_tiles):
        _, first_row, end = read_tile(tiles, max_tiles, m)
        row = first_row + tl.arange(0, BM)
        column = tl.program_id(1) * BC + tl.arange(0, BC)
        inside = (row < end)[:, None] & (column < columns)[None, :]
        if GATHERED:
            row = tl.load(tokens + row, mask=row < end, other=0)
        values = tl.load(x + row.to(tl.int64)[:, None] * stride_x + column[None, :], mask=inside, other=0.0)
        store_in_mx(tl.trans(values), q, scale, column, m * BM, columns, max_tiles * BM, BC, BM)


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
    left_scale, right_scale,  # None and [E, Q], or [E, P] and None, float32; or MX [P, W / 32], [Q, W / 32]
    out,  # [E, P, Q], the weight's dtype, neighbours along Q: written
    experts,  # [4 E], int32: expert, first row, end and first tile of each, those with most rows first
    max_tiles, num_experts, p_columns, q_columns, stride_e, stride_p,
    BM: tl.constexpr, BP: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    STAGES: tl.constexpr, DESCRIBED: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """out_e = left' right over the rows of expert e; 0 without rows.

    Grid: (programs,) over experts and tiles of BP by BQ. BK divides BM.
    """
    MX: tl.constexpr = left_scale is not None and right_scale is not None
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
        row, column = p * BP + tl.arange(0, BP), q * BQ + tl.arange(0, BQ)
        acc = tl.zeros([BP, BQ], tl.float32)
        for k in tl.range(begin, begin + tl.cdiv(rows, BM) * BM, BK, num_stages=STAGES):
            a = _slab(left, p * BP, k, p_columns, width, BP, BK, DESCRIBED)
            b = _slab(right, q * BQ, k, q_columns, width, BQ, BK, DESCRIBED)
            if MX:
                of_a = scales(left_scale, row.to(tl.int64), (row < p_columns)[:, None], k, width, BK)
                of_b = scales(right_scale, column.to(tl.int64), (column < q_columns)[:, None], k, width, BK)
                acc = tl.dot_scaled(a, of_a, "e4m3", tl.trans(b), of_b, "e4m3", acc)
            else:
                acc = tl.dot(a, tl.trans(b), acc)
        if right_scale is None:
            s = tl.load(left_scale + expert.to(tl.int64) * p_columns + row, mask=row < p_columns, other=0.0)
            acc *= s[:, None]
        elif left_scale is None:
            place = expert.to(tl.int64) * q_columns + column
            acc *= tl.load(right_scale + place, mask=column < q_columns, other=0.0)[None, :]
        of_expert = out + expert.to(tl.int64) * stride_e
        out_pointers = of_expert + row.to(tl.int64)[:, None] * stride_p + column[None, :]
        mask = (row < p_columns)[:, None] & (column < q_columns)[None, :]
        tl.store(out_pointers, acc.to(out.dtype.element_ty), mask=mask)
