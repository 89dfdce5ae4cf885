"""Device code of experts' products; `veomni_hook.kernels.moe_experts.triton_products` launches it.

A row is one (token, place) pair with an expert; rows are sorted by expert. ``tiles`` holds, for each tile of
``BM`` rows, its expert, its first row and the end of the expert's rows, in three parts of ``most`` numbers,
followed by the number of tiles. Programs loop over tiles, so the grid does not depend on counts.

Columns of a weight may be paired, one gate and one up column: ``PAIRED`` 0 no, 1 all gates before all ups,
2 alternating. The product of a paired tile has ``2 * BN`` columns, and ``columns`` counts pairs. If the first
product is not paired, there is a gate and no up.

Arguments that depend on the number of tokens are not specialised, so a new batch size recompiles nothing.
"""

import triton
import triton.language as tl

from veomni_hook.kernels.gated_mlp.device import gated, gated_backward

__all__ = ["gate_up", "gate_up_backward", "rows_product", "weight_gradient"]


@triton.jit
def _place(index, m_tiles, n_tiles, GROUP: tl.constexpr):
    """Tile of rows and of columns: ``GROUP`` tiles of rows use one tile of columns before the next."""
    group = index // (GROUP * n_tiles)
    within = index % (GROUP * n_tiles)
    size = tl.minimum(m_tiles - group * GROUP, GROUP)
    return group * GROUP + within % size, within // size


@triton.jit
def _tile(tiles, most, tile):
    return tl.load(tiles + tile), tl.load(tiles + most + tile), tl.load(tiles + 2 * most + tile)


@triton.jit
def _rows_of_x(tokens, rows, row, end, ORDERED: tl.constexpr):
    """The rows of x that a tile reads: its own rows if ``ORDERED``, else those of their tokens.

    A row past the end is computed from an existing row and not stored.
    """
    if ORDERED:
        found = tl.where(rows < end, rows, row).to(tl.int64)
    else:
        found = tl.load(tokens + rows, mask=rows < end, other=0).to(tl.int64)
    return found


@triton.jit
def _columns(first, columns, BN: tl.constexpr, PAIRED: tl.constexpr):
    """The positions of a tile's columns in a row of a weight's products, and which of them exist."""
    if PAIRED == 0:
        place = first + tl.arange(0, BN)
        there = place < columns
    elif PAIRED == 1:
        lane = tl.arange(0, 2 * BN)
        one = first + lane % BN
        place = one + (lane // BN) * columns
        there = one < columns
    else:
        place = 2 * first + tl.arange(0, 2 * BN)
        there = place < 2 * columns
    return place, there


@triton.jit
def _parted(pairs, BM: tl.constexpr, BN: tl.constexpr, PAIRED: tl.constexpr):
    """Split a paired tile into gate and up."""
    if PAIRED == 1:
        one, other = tl.split(tl.permute(tl.reshape(pairs, (BM, 2, BN)), (0, 2, 1)))
    else:
        one, other = tl.split(tl.reshape(pairs, (BM, BN, 2)))
    return one, other


@triton.jit
def _product(
    x, x_rows, row, w, w_expert, w_column, w_inner, expert, first, inner, columns,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PAIRED: tl.constexpr, TRANSPOSED: tl.constexpr,
    X_DESCRIBED: tl.constexpr, W_DESCRIBED: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A tile of rows of x times a tile of columns of the expert's weight, in float32.

    ``x``: a descriptor of contiguous rows, read from ``row`` on, or a pointer, with ``x_rows`` to each row.
    ``EVEN``: everything that is not read through a descriptor comes in whole tiles.
    """
    WIDE: tl.constexpr = BN if PAIRED == 0 else 2 * BN
    LEAD: tl.constexpr = 2 if PAIRED == 1 else 1
    STEP: tl.constexpr = 2 if PAIRED == 2 else 1
    lane = tl.arange(0, BK)
    place, there = _columns(first, columns, BN, PAIRED)
    if not X_DESCRIBED:
        x_here = x + x_rows[:, None] + lane[None, :]
    if not W_DESCRIBED:
        w_here = w + expert.to(tl.int64) * w_expert + place.to(tl.int64)[None, :] * w_column
    acc = tl.zeros([BM, WIDE], tl.float32)
    for k in tl.range(0, inner, BK, num_stages=STAGES):
        if X_DESCRIBED:
            a = x.load([row, k])
        elif EVEN:
            a = tl.load(x_here + k)
        else:
            a = tl.load(x_here + k, mask=lane[None, :] < inner - k, other=0.0)
        if W_DESCRIBED:
            if TRANSPOSED:
                b = tl.reshape(w.load([expert, k, first * STEP]), (BK, WIDE))
            else:
                b = tl.trans(tl.reshape(w.load([expert * LEAD, first * STEP, k]), (WIDE, BK)))
        elif EVEN:
            b = tl.load(w_here + (k + lane).to(tl.int64)[:, None] * w_inner)
        else:
            b = tl.load(
                w_here + (k + lane).to(tl.int64)[:, None] * w_inner,
                mask=(lane[:, None] < inner - k) & there[None, :],
                other=0.0,
            )
        acc = tl.dot(a, b, acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["most"])
def gate_up(
    x, w, bias, h, products, tokens, tiles, most, inner, columns, x_row, w_expert, w_column, w_inner,
    limit, alpha,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
    PAIRED: tl.constexpr, TRANSPOSED: tl.constexpr, ORDERED: tl.constexpr, X_DESCRIBED: tl.constexpr,
    W_DESCRIBED: tl.constexpr, EVEN: tl.constexpr, BIASED: tl.constexpr, KEEP: tl.constexpr,
    FORM: tl.constexpr, ACTIVATION: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """h [rows, columns] from rows of x, gathered unless they are ``ORDERED``.

    ``KEEP``: also store gate and up, in the weight's column order.
    """
    m_tiles = tl.load(tiles + 3 * most)
    n_tiles = tl.cdiv(columns, BN)
    for index in tl.range(tl.program_id(0), m_tiles * n_tiles, tl.num_programs(0), flatten=FLATTEN):
        tile, n = _place(index, m_tiles, n_tiles, GROUP)
        expert, row, end = _tile(tiles, most, tile)
        rows = row + tl.arange(0, BM)
        x_rows = _rows_of_x(tokens, rows, row, end, ORDERED) * x_row
        acc = _product(
            x, x_rows, row, w, w_expert, w_column, w_inner, expert, n * BN, inner, columns,
            BM, BN, BK, PAIRED, TRANSPOSED, X_DESCRIBED, W_DESCRIBED, EVEN, STAGES,
        )  # fmt: skip
        dtype = h.dtype.element_ty
        if BIASED:
            place, there = _columns(n * BN, columns, BN, PAIRED)
            begin = bias + expert.to(tl.int64) * (1 if PAIRED == 0 else 2) * columns
            acc += tl.load(begin + place, mask=there, other=0.0).to(tl.float32)[None, :]
        rows_there = (rows < end)[:, None]
        wide = rows.to(tl.int64)[:, None]
        column = n * BN + tl.arange(0, BN)
        there = rows_there & (column < columns)[None, :]
        pairs = acc.to(dtype)
        if KEEP and PAIRED == 2:
            place, inside = _columns(n * BN, columns, BN, PAIRED)
            here = products + wide * 2 * columns + place[None, :]
            tl.store(here, pairs, mask=rows_there & inside[None, :])
        if PAIRED == 0:
            gate, up = pairs, pairs
        else:
            gate, up = _parted(pairs, BM, BN, PAIRED)
        if KEEP and PAIRED == 0:
            tl.store(products + wide * columns + column[None, :], gate, mask=there)
        if KEEP and PAIRED == 1:
            tl.store(products + wide * 2 * columns + column[None, :], gate, mask=there)
            tl.store(products + wide * 2 * columns + (columns + column)[None, :], up, mask=there)
        low = (tl.zeros([1, 1], tl.float32) + limit).to(dtype).to(tl.float32)
        y = gated(gate.to(tl.float32), up.to(tl.float32), low, alpha, FORM, ACTIVATION, tl.float32)
        tl.store(h + wide * columns + column[None, :], y.to(dtype), mask=there)


@triton.jit(do_not_specialize=["most"])
def rows_product(
    x, w, bias, y, pairs, weights, tiles, most, inner, columns, w_expert, w_column, w_inner,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
    TRANSPOSED: tl.constexpr, X_DESCRIBED: tl.constexpr, W_DESCRIBED: tl.constexpr, EVEN: tl.constexpr,
    BIASED: tl.constexpr, WEIGHTED: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """y [rows, columns] from contiguous rows of x, times each row's routing weight if ``WEIGHTED``."""
    m_tiles = tl.load(tiles + 3 * most)
    n_tiles = tl.cdiv(columns, BN)
    for index in tl.range(tl.program_id(0), m_tiles * n_tiles, tl.num_programs(0), flatten=FLATTEN):
        tile, n = _place(index, m_tiles, n_tiles, GROUP)
        expert, row, end = _tile(tiles, most, tile)
        rows = row + tl.arange(0, BM)
        there = rows < end
        x_rows = _rows_of_x(pairs, rows, row, end, True) * inner
        acc = _product(
            x, x_rows, row, w, w_expert, w_column, w_inner, expert, n * BN, inner, columns,
            BM, BN, BK, 0, TRANSPOSED, X_DESCRIBED, W_DESCRIBED, EVEN, STAGES,
        )  # fmt: skip
        column = n * BN + tl.arange(0, BN)
        if BIASED:
            begin = bias + expert.to(tl.int64) * columns
            acc += tl.load(begin + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
        if WEIGHTED:
            pair = tl.load(pairs + rows, mask=there, other=0)
            acc *= tl.load(weights + pair, mask=there, other=0.0).to(tl.float32)[:, None]
        here = y + rows.to(tl.int64)[:, None] * columns + column[None, :]
        tl.store(here, acc.to(y.dtype.element_ty), mask=there[:, None] & (column < columns)[None, :])


@triton.jit
def _gradients(
    dh, products, gradients, h, rows, rows_there, weight, first, columns, limit, alpha,
    BM: tl.constexpr, BN: tl.constexpr, PAIRED: tl.constexpr, FORM: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Process the columns from ``first`` on for `gate_up_backward`; return their sums of dh * h."""
    wide = rows.to(tl.int64)[:, None]
    column = first + tl.arange(0, BN)
    there = rows_there[:, None] & (column < columns)[None, :]
    dtype = h.dtype.element_ty
    begin = products + wide * (1 if PAIRED == 0 else 2) * columns
    target = gradients + wide * (1 if PAIRED == 0 else 2) * columns
    if PAIRED == 0:
        gate = tl.load(begin + column[None, :], mask=there, other=0.0)
        up = gate
    elif PAIRED == 1:
        gate = tl.load(begin + column[None, :], mask=there, other=0.0)
        up = tl.load(begin + (columns + column)[None, :], mask=there, other=0.0)
    else:
        place, inside = _columns(first, columns, BN, PAIRED)
        joint = rows_there[:, None] & inside[None, :]
        gate, up = _parted(tl.load(begin + place[None, :], mask=joint, other=0.0), BM, BN, PAIRED)
    weight = weight[:, None]
    to_gate, to_up, y = gated_backward(
        gate.to(tl.float32), up.to(tl.float32), dh * weight, limit, alpha, FORM, ACTIVATION, tl.float32
    )
    if PAIRED == 2:
        both = tl.reshape(tl.join(to_gate.to(dtype), to_up.to(dtype)), (BM, 2 * BN))
        tl.store(target + place[None, :], both, mask=joint)
    else:
        tl.store(target + column[None, :], to_gate.to(dtype), mask=there)
    if PAIRED == 1:
        tl.store(target + (columns + column)[None, :], to_up.to(dtype), mask=there)
    tl.store(h + wide * columns + column[None, :], (y * weight).to(dtype), mask=there)
    return tl.sum(tl.where(there, dh * y, 0.0), axis=1)


@triton.jit
def _gradients_by_parts(
    dh, products, gradients, h, rows, rows_there, weight, first, columns, limit, alpha,
    BM: tl.constexpr, BN: tl.constexpr, PAIRED: tl.constexpr, FORM: tl.constexpr, ACTIVATION: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Run `_gradients` on one part of the columns at a time.

    A whole tile's gate, up and gradients do not fit into registers: at 128 x 128 with 8 warps, each thread
    would spill 1.6 KB.
    """
    if PARTS == 1:
        sums = _gradients(
            dh, products, gradients, h, rows, rows_there, weight, first, columns, limit, alpha,
            BM, BN, PAIRED, FORM, ACTIVATION,
        )  # fmt: skip
    else:
        left, right = _parted(dh, BM, BN // 2, 1)
        sums = _gradients_by_parts(
            left, products, gradients, h, rows, rows_there, weight, first, columns, limit, alpha,
            BM, BN // 2, PAIRED, FORM, ACTIVATION, PARTS // 2,
        )  # fmt: skip
        sums += _gradients_by_parts(
            right, products, gradients, h, rows, rows_there, weight, first + BN // 2, columns, limit, alpha,
            BM, BN // 2, PAIRED, FORM, ACTIVATION, PARTS // 2,
        )  # fmt: skip
    return sums


@triton.jit(do_not_specialize=["most", "total"])
def gate_up_backward(
    dout, w, products, gradients, h, partial, tokens, pairs, weights, tiles, most, inner, columns, total,
    d_row, w_expert, w_column, w_inner, limit, alpha,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
    PAIRED: tl.constexpr, TRANSPOSED: tl.constexpr, ORDERED: tl.constexpr, X_DESCRIBED: tl.constexpr,
    W_DESCRIBED: tl.constexpr, EVEN: tl.constexpr, PARTS: tl.constexpr, FORM: tl.constexpr,
    ACTIVATION: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """The gradients of gate and up from rows of dout; ``gradients`` may be ``products`` itself.

    Writes weight * h, rounded once, to ``h``, and to ``partial`` [tiles of columns, total] the sums over a
    tile's columns from which the routing weight's gradient is computed.
    """
    m_tiles = tl.load(tiles + 3 * most)
    n_tiles = tl.cdiv(columns, BN)
    for index in tl.range(tl.program_id(0), m_tiles * n_tiles, tl.num_programs(0), flatten=FLATTEN):
        tile, n = _place(index, m_tiles, n_tiles, GROUP)
        expert, row, end = _tile(tiles, most, tile)
        rows = row + tl.arange(0, BM)
        rows_there = rows < end
        d_rows = _rows_of_x(tokens, rows, row, end, ORDERED) * d_row
        dh = _product(
            dout, d_rows, row, w, w_expert, w_column, w_inner, expert, n * BN, inner, columns,
            BM, BN, BK, 0, TRANSPOSED, X_DESCRIBED, W_DESCRIBED, EVEN, STAGES,
        )  # fmt: skip
        pair = tl.load(pairs + rows, mask=rows_there, other=0)
        weight = tl.load(weights + pair, mask=rows_there, other=0.0).to(tl.float32)
        low = (tl.zeros([1, 1], tl.float32) + limit).to(h.dtype.element_ty).to(tl.float32)
        sums = _gradients_by_parts(
            dh, products, gradients, h, rows, rows_there, weight, n * BN, columns, low, alpha,
            BM, BN, PAIRED, FORM, ACTIVATION, PARTS,
        )  # fmt: skip
        tl.store(partial + n.to(tl.int64) * total + rows, sums, mask=rows_there)


@triton.jit
def _slab(
    x, described, begin, end, first, tokens, x_row, columns,
    GATHER: tl.constexpr, DESCRIBED: tl.constexpr, EVEN: tl.constexpr, LAST: tl.constexpr,
    BK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of columns of the rows from ``begin`` on.

    In the ``LAST`` slab, rows from ``end`` on are zeroed: they hold another expert's numbers, or garbage.
    """
    if DESCRIBED and not LAST:
        slab = described.load([begin, first])
    else:
        rows = begin + tl.arange(0, BK)
        column = first + tl.arange(0, BLOCK)
        there = begin + tl.arange(0, BK) < end
        if GATHER:
            if LAST:
                rows = tl.load(tokens + rows, mask=there, other=0)
            else:
                rows = tl.load(tokens + rows)
        here = x + rows.to(tl.int64)[:, None] * x_row + column[None, :]
        if LAST:
            slab = tl.load(here, mask=there[:, None] & (column < columns)[None, :], other=0.0)
        elif EVEN:
            slab = tl.load(here)
        else:
            slab = tl.load(here, mask=(column < columns)[None, :], other=0.0)
    return slab


@triton.jit
def weight_gradient(
    left, left_described, right, right_described, out, tokens, offsets, experts, p_columns, q_columns,
    left_row, right_row,
    BP: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
    LEFT_GATHER: tl.constexpr, RIGHT_GATHER: tl.constexpr, LEFT_DESCRIBED: tl.constexpr,
    RIGHT_DESCRIBED: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """out [experts, p_columns, q_columns]: left^T right over an expert's rows; one side may be gathered."""
    p_tiles = tl.cdiv(p_columns, BP)
    q_tiles = tl.cdiv(q_columns, BQ)
    of_expert = p_tiles * q_tiles
    for index in tl.range(tl.program_id(0), experts * of_expert, tl.num_programs(0)):
        expert = index // of_expert
        p, q = _place(index % of_expert, p_tiles, q_tiles, GROUP)
        begin, end = tl.load(offsets + expert), tl.load(offsets + expert + 1)
        whole = begin + (end - begin) // BK * BK
        acc = tl.zeros([BP, BQ], tl.float32)
        for k in tl.range(begin, whole, BK, num_stages=STAGES):
            a = _slab(
                left, left_described, k, end, p * BP, tokens, left_row, p_columns,
                LEFT_GATHER, LEFT_DESCRIBED, EVEN, False, BK, BP,
            )  # fmt: skip
            b = _slab(
                right, right_described, k, end, q * BQ, tokens, right_row, q_columns,
                RIGHT_GATHER, RIGHT_DESCRIBED, EVEN, False, BK, BQ,
            )  # fmt: skip
            acc = tl.dot(tl.trans(a), b, acc, input_precision="ieee")
        if whole < end:
            a = _slab(
                left, left_described, whole, end, p * BP, tokens, left_row, p_columns,
                LEFT_GATHER, LEFT_DESCRIBED, EVEN, True, BK, BP,
            )  # fmt: skip
            b = _slab(
                right, right_described, whole, end, q * BQ, tokens, right_row, q_columns,
                RIGHT_GATHER, RIGHT_DESCRIBED, EVEN, True, BK, BQ,
            )  # fmt: skip
            acc = tl.dot(tl.trans(a), b, acc, input_precision="ieee")
        row = (p * BP + tl.arange(0, BP))[:, None]
        column = (q * BQ + tl.arange(0, BQ))[None, :]
        here = out + (expert.to(tl.int64) * p_columns + row) * q_columns + column
        tl.store(here, acc.to(out.dtype.element_ty), mask=(row < p_columns) & (column < q_columns))
