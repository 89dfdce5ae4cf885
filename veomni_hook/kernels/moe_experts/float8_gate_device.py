"""Device code of the gradients of gate and up in float8; `.triton_float8` launches it.

Backward: [dg, du] = gate'(g, u) (w dh), h = gate(g, u), and the sums <dh, h>
`.device` defines R, E, W, I and tiles. A cast wants the largest number of its row or column first, so
`gradients` writes them in D, where g, u and dh were, and `cast` reads what it wrote.
"""

import triton
import triton.language as tl

from veomni_hook.kernels.float8.device import larger, magnitude, scale_of
from veomni_hook.kernels.gated_mlp.device import gated_backward
from veomni_hook.kernels.moe_experts.device import read_tile, tile_at
from veomni_hook.kernels.moe_experts.float8_gradient_device import write_columns

__all__ = ["cast", "gradients"]


@triton.jit
def _keep_largest(pointers, most, exist, AXIS: tl.constexpr):
    """Update the largest numbers of rows or columns, as `magnitude`."""
    tl.atomic_max(pointers, tl.max(magnitude(most), axis=AXIS), mask=exist, sem="relaxed")


@triton.jit
def _gradients(
    dh, products, slopes, weights, pairs, rows, exist, column, columns, width, step, lead, limit, alpha,
    FORM: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Write dg, du and w h of some rows, and return them as written, in float32, with the sums of dh h."""
    dtype: tl.constexpr = dh.dtype.element_ty
    inside = exist[:, None] & (column < columns)[None, :]
    place = rows.to(tl.int64)[:, None] * width + (column * step)[None, :]
    place_of_h = rows.to(tl.int64)[:, None] * columns + column[None, :]
    gate = tl.load(products + place, mask=inside, other=0.0).to(tl.float32)
    up = gate
    if FORM != 4:
        up = tl.load(products + place + lead, mask=inside, other=0.0).to(tl.float32)
    slope = tl.load(dh + place_of_h, mask=inside, other=0.0).to(tl.float32)
    pair = tl.load(pairs + rows, mask=exist, other=0)
    weight = tl.load(weights + pair, mask=exist, other=0.0).to(tl.float32)[:, None]
    limit = (tl.zeros([1, 1], tl.float32) + limit).to(dtype).to(tl.float32)
    dgate, dup, h = gated_backward(gate, up, slope * weight, limit, alpha, FORM, ACTIVATION, tl.float32)
    dgate, dup, weighted = dgate.to(dtype), dup.to(dtype), (h * weight).to(dtype)
    tl.store(slopes + place, dgate, mask=inside)
    if FORM != 4:
        tl.store(slopes + place + lead, dup, mask=inside)
    tl.store(dh + place_of_h, weighted, mask=inside)
    return dgate.to(tl.float32), dup.to(tl.float32), weighted.to(tl.float32), tl.sum(slope * h, axis=1)


@triton.jit(do_not_specialize=["max_tiles", "num_pairs"])
def gradients(
    dh,  # [R, I], D; becomes w h
    products,  # [R, W], D: g and u
    slopes,  # [R, W], D: dg and du; written; may be ``products``
    weights,  # [T, K], float: routing weights of pairs
    tokens,  # [R], int32: the token of a row
    pairs,  # [R], int32: the pair of a row
    tiles,  # [3 * max_tiles + 1], int32
    offsets,  # [E + 1], int32: the first row of each expert
    x_scale, dout_scale,  # [T], float32: of the rows of the factors by which gradients of weights sum
    of_rows,  # [R], int32, zeros before: the largest of dg and du as `magnitude`; written unless None
    of_columns,  # [E, W], likewise, of x_scale [dg, du]
    of_h,  # [E, I], likewise, of dout_scale w h
    partial,  # [n_tiles, R], float32: a tile's sums of dh h; written
    max_tiles, columns, num_pairs,  # columns is I, num_pairs is R
    width, step, lead,  # W; from a gate to the next, and to its up
    limit, alpha,  # of the gate, float
    BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr, FORM: tl.constexpr, ACTIVATION: tl.constexpr,
    SPAN: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The gradients, and the largest numbers of rows and of an expert's columns.

    ROWS at a time, STAGES of which are on their way. Grid: max_tiles * cdiv(columns, BN).
    """
    m_tiles = tl.load(tiles + 3 * max_tiles)
    if tl.program_id(0) < m_tiles * tl.cdiv(columns, BN):
        m, n = tile_at(tl.program_id(0), m_tiles, tl.cdiv(columns, BN), GROUP)
        expert, first_row, end = read_tile(tiles, max_tiles, m)
        expert = expert.to(tl.int64)
        column = n * BN + tl.arange(0, BN)
        exists = column < columns
        # Every SPAN-th tile's program does the tiles up to the next one: a reduction over warps takes long.
        if (first_row - tl.load(offsets + expert)) % (SPAN * BM) == 0:
            most_gate = tl.zeros([ROWS, BN], tl.float32)
            most_up, most_weighted = most_gate, most_gate
            last = tl.minimum(first_row + SPAN * BM, end)
            for first in tl.range(first_row, last, ROWS, num_stages=STAGES):
                rows = first + tl.arange(0, ROWS)
                exist = rows < end
                dgate, dup, weighted, share = _gradients(
                    dh, products, slopes, weights, pairs, rows, exist, column, columns, width, step, lead,
                    limit, alpha, FORM, ACTIVATION,
                )  # fmt: skip
                tl.store(partial + n.to(tl.int64) * num_pairs + rows, share, mask=exist)
                token = tl.load(tokens + rows, mask=exist, other=0)
                if of_rows is not None:
                    most = tl.abs(dgate) if FORM == 4 else larger(tl.abs(dgate), dup)
                    _keep_largest(of_rows + rows, most, exist, 1)
                if of_columns is not None:
                    factor = tl.load(x_scale + token, mask=exist, other=0.0)[:, None]
                    most_gate = larger(most_gate, dgate * factor)
                    most_up = larger(most_up, dup * factor)
                if of_h is not None:
                    factor = tl.load(dout_scale + token, mask=exist, other=0.0)[:, None]
                    most_weighted = larger(most_weighted, weighted * factor)
            if of_columns is not None:
                place = of_columns + expert * width + column * step
                _keep_largest(place, most_gate, exists, 0)
                if FORM != 4:
                    _keep_largest(place + lead, most_up, exists, 0)
            if of_h is not None:
                _keep_largest(of_h + expert * columns + column, most_weighted, exists, 0)


@triton.jit(do_not_specialize=["max_tiles"])
def cast(
    x,  # [R, columns], D
    factors,  # [T], float32: the rows of columns are multiplied by them
    tokens, tiles,  # as in `gradients`
    of_rows, of_columns,  # [R] and [E, columns], from `gradients`
    rows_q, rows_scale,  # [R, columns], float8, and [R], float32: x; written unless of_rows is None
    columns_q, columns_scale,  # [columns, bytes], float8, and [E, columns], float32: factors x, likewise
    max_tiles, columns,
    BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Rows in float8, and columns, which come out as rows; bytes: BM of each tile.

    Grid: max_tiles * cdiv(columns, BN).
    """
    QUARTER: tl.constexpr = BM // 4
    m_tiles = tl.load(tiles + 3 * max_tiles)
    if tl.program_id(0) < m_tiles * tl.cdiv(columns, BN):
        m, n = tile_at(tl.program_id(0), m_tiles, tl.cdiv(columns, BN), GROUP)
        expert, first_row, end = read_tile(tiles, max_tiles, m)
        column = n * BN + tl.arange(0, BN)
        exists = column < columns
        packed = tl.zeros([QUARTER, BN], tl.uint32)
        if of_columns is not None:
            place = expert.to(tl.int64) * columns + column
            s, of_column = scale_of(tl.load(of_columns + place, mask=exists, other=0))
            tl.store(columns_scale + place, s, mask=exists)  # the same number from all tiles of the expert
        for part in tl.static_range(4):
            rows = first_row + 4 * tl.arange(0, QUARTER) + part
            exist = rows < end
            inside = exist[:, None] & exists[None, :]
            place = rows.to(tl.int64)[:, None] * columns + column[None, :]
            values = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
            if of_rows is not None:
                s, of_row = scale_of(tl.load(of_rows + rows, mask=exist, other=0))
                tl.store(rows_scale + rows, s, mask=exist & (n == 0))
                q = (values * of_row[:, None]).to(tl.float8e4nv)
                tl.store(rows_q + place, q, mask=inside)
            if of_columns is not None:
                token = tl.load(tokens + rows, mask=exist, other=0)
                factor = tl.load(factors + token, mask=exist, other=0.0)
                q = (values * factor[:, None] * of_column[None, :]).to(tl.float8e4nv)
                packed |= q.to(tl.uint8, bitcast=True).to(tl.uint32) << (8 * part)
        if of_columns is not None:
            write_columns(columns_q, packed, column, exists, m, max_tiles, QUARTER)
