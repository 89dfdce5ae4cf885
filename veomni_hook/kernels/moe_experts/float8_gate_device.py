"""Device code of the gradients of gate and up in float8; `.triton_float8` launches it.

Backward: [dg, du] = gate'(g, u) (w dh), h = gate(g, u), and the sums <dh, h>
`.device` defines R, E, W, I and tiles. The gradients are computed twice, because a cast wants the largest
number of its row or column first, and g, u and dh are fewer bytes than results that are written and read.
"""

import triton
import triton.language as tl

from veomni_hook.kernels.float8.device import magnitude, scale_of
from veomni_hook.kernels.gated_mlp.device import gated_backward
from veomni_hook.kernels.moe_experts.device import read_tile, tile_at
from veomni_hook.kernels.moe_experts.float8_gradient_device import write_columns

__all__ = ["cast", "largest"]


@triton.jit
def _gradients(
    dh, products, weights, pairs, rows, end, column, columns, width, step, lead, limit, alpha,
    FORM: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """dg, du, w h and dh h, in float32; 0 where there is no row."""
    inside = (rows < end)[:, None] & (column < columns)[None, :]
    rows64 = rows.to(tl.int64)[:, None]
    pointers = products + rows64 * width + (column * step)[None, :]
    gate = tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
    up = gate
    if FORM != 4:
        up = tl.load(pointers + lead, mask=inside, other=0.0).to(tl.float32)
    slope = tl.load(dh + rows64 * columns + column[None, :], mask=inside, other=0.0).to(tl.float32)
    pair = tl.load(pairs + rows, mask=rows < end, other=0)
    weight = tl.load(weights + pair, mask=rows < end, other=0.0).to(tl.float32)[:, None]
    limit = (tl.zeros([1, 1], tl.float32) + limit).to(products.dtype.element_ty).to(tl.float32)
    dgate, dup, h = gated_backward(gate, up, slope * weight, limit, alpha, FORM, ACTIVATION, tl.float32)
    return dgate, dup, h * weight, slope * h


@triton.jit(do_not_specialize=["max_tiles", "num_pairs"])
def largest(
    dh,  # [R, I], D
    products,  # [R, W], D: g and u
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
    SPAN: tl.constexpr,
):  # fmt: skip
    """The largest numbers of rows, and of an expert's columns. Grid: max_tiles * cdiv(columns, BN)."""
    QUARTER: tl.constexpr = BM // 4  # more rows at once do not fit into registers
    m_tiles = tl.load(tiles + 3 * max_tiles)
    if tl.program_id(0) < m_tiles * tl.cdiv(columns, BN):
        m, n = tile_at(tl.program_id(0), m_tiles, tl.cdiv(columns, BN), GROUP)
        expert, first_row, end = read_tile(tiles, max_tiles, m)
        expert = expert.to(tl.int64)
        column = n * BN + tl.arange(0, BN)
        # Every SPAN-th tile's program does the tiles up to the next one: a reduction over warps takes long.
        if (first_row - tl.load(offsets + expert)) % (SPAN * BM) == 0:
            most_gate = tl.zeros([QUARTER, BN], tl.int32)
            most_up, most_weighted = most_gate, most_gate
            for first in range(first_row, tl.minimum(first_row + SPAN * BM, end), QUARTER):
                rows = first + tl.arange(0, QUARTER)
                exist = rows < end
                dgate, dup, weighted, share = _gradients(
                    dh, products, weights, pairs, rows, end, column, columns, width, step, lead, limit, alpha,
                    FORM, ACTIVATION,
                )  # fmt: skip
                tl.store(partial + n.to(tl.int64) * num_pairs + rows, tl.sum(share, axis=1), mask=exist)
                if of_rows is not None:
                    most = magnitude(dgate)
                    if FORM != 4:
                        most = tl.maximum(most, magnitude(dup))
                    tl.atomic_max(of_rows + rows, tl.max(most, axis=1), mask=exist, sem="relaxed")
                token = tl.load(tokens + rows, mask=exist, other=0)
                if of_columns is not None:
                    factor = tl.load(x_scale + token, mask=exist, other=0.0)[:, None]
                    most_gate = tl.maximum(most_gate, magnitude(dgate * factor))
                    most_up = tl.maximum(most_up, magnitude(dup * factor))
                if of_h is not None:
                    factor = tl.load(dout_scale + token, mask=exist, other=0.0)[:, None]
                    most_weighted = tl.maximum(most_weighted, magnitude(weighted * factor))
            exist = column < columns
            if of_columns is not None:
                place = of_columns + expert * width + column * step
                tl.atomic_max(place, tl.max(most_gate, axis=0), mask=exist, sem="relaxed")
                if FORM != 4:
                    tl.atomic_max(place + lead, tl.max(most_up, axis=0), mask=exist, sem="relaxed")
            if of_h is not None:
                place = of_h + expert * columns + column
                tl.atomic_max(place, tl.max(most_weighted, axis=0), mask=exist, sem="relaxed")


@triton.jit
def _inverse(largest, scale, place, exists):
    """1 / s of columns, of which ``scale`` gets the s."""
    s, inverse = scale_of(tl.load(largest + place, mask=exists, other=0))
    tl.store(scale + place, s, mask=exists)  # the same number from all tiles of the expert
    return inverse


@triton.jit
def _packed(packed, values, factor, inverse, PART: tl.constexpr):
    """``packed`` with ``values`` in float8 as byte PART of its integers."""
    q = (values * factor[:, None] * inverse[None, :]).to(tl.float8e4nv)
    return packed | (q.to(tl.uint8, bitcast=True).to(tl.uint32) << (8 * PART))


@triton.jit
def _store(pointers, lead, gate, up, inside, FORM: tl.constexpr):
    """Store what belongs to gates, and ``lead`` after them what belongs to ups."""
    tl.store(pointers, gate.to(pointers.dtype.element_ty), mask=inside)
    if FORM != 4:
        tl.store(pointers + lead, up.to(pointers.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["max_tiles"])
def cast(
    dh, products, weights, tokens, pairs, tiles, offsets, x_scale, dout_scale,  # as in `largest`
    of_rows, of_columns, of_h,  # from `largest`
    rows_q, rows_scale,  # [R, W], float8, and [R], float32: [dg, du]; written unless of_rows is None
    columns_q, columns_scale,  # [W, bytes], float8, and [E, W], float32: x_scale [dg, du], likewise
    h_q, h_scale,  # [I, bytes] and [E, I]: dout_scale w h, likewise
    gradients, h,  # [R, W] and [R, I], D: dg and du, and w h; written unless None; products and dh may be
    max_tiles, columns, width, step, lead, limit, alpha,
    BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr, FORM: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Rows in float8, and columns, which come out as rows; bytes: BM of each tile. Grid: as `largest`."""
    QUARTER: tl.constexpr = BM // 4
    m_tiles = tl.load(tiles + 3 * max_tiles)
    if tl.program_id(0) < m_tiles * tl.cdiv(columns, BN):
        m, n = tile_at(tl.program_id(0), m_tiles, tl.cdiv(columns, BN), GROUP)
        expert, first_row, end = read_tile(tiles, max_tiles, m)
        expert = expert.to(tl.int64)
        column = n * BN + tl.arange(0, BN)
        exists = column < columns
        position = column * step
        gate_q = tl.zeros([QUARTER, BN], tl.uint32)
        up_q, weighted_q = gate_q, gate_q
        if of_columns is not None:
            place = expert * width + position
            of_gate = _inverse(of_columns, columns_scale, place, exists)
            of_up = of_gate if FORM == 4 else _inverse(of_columns, columns_scale, place + lead, exists)
        if of_h is not None:
            of_weighted = _inverse(of_h, h_scale, expert * columns + column, exists)
        for part in tl.static_range(4):
            rows = first_row + 4 * tl.arange(0, QUARTER) + part
            exist = rows < end
            inside = exist[:, None] & exists[None, :]
            dgate, dup, weighted, _share = _gradients(
                dh, products, weights, pairs, rows, end, column, columns, width, step, lead, limit, alpha,
                FORM, ACTIVATION,
            )  # fmt: skip
            rows64 = rows.to(tl.int64)[:, None]
            place = rows64 * width + position[None, :]
            token = tl.load(tokens + rows, mask=exist, other=0)
            if of_rows is not None:
                s, inverse = scale_of(tl.load(of_rows + rows, mask=exist, other=0))
                tl.store(rows_scale + rows, s, mask=exist & (n == 0))
                inverse = inverse[:, None]
                _store(rows_q + place, lead, dgate * inverse, dup * inverse, inside, FORM)
            if of_columns is not None:
                factor = tl.load(x_scale + token, mask=exist, other=0.0)
                gate_q = _packed(gate_q, dgate, factor, of_gate, part)
                up_q = _packed(up_q, dup, factor, of_up, part)
            if of_h is not None:
                factor = tl.load(dout_scale + token, mask=exist, other=0.0)
                weighted_q = _packed(weighted_q, weighted, factor, of_weighted, part)
            if gradients is not None:
                _store(gradients + place, lead, dgate, dup, inside, FORM)
                pointers = h + rows64 * columns + column[None, :]
                tl.store(pointers, weighted.to(h.dtype.element_ty), mask=inside)
        if of_columns is not None:
            write_columns(columns_q, gate_q, position, exists, m, max_tiles, QUARTER)
            if FORM != 4:
                write_columns(columns_q, up_q, position + lead, exists, m, max_tiles, QUARTER)
        if of_h is not None:
            write_columns(h_q, weighted_q, column, exists, m, max_tiles, QUARTER)
