"""Device code of experts' products; `veomni_hook.kernels.moe_experts.triton_products` launches it.

A row is one (token, place) pair with an expert; rows are sorted by expert. ``tiles`` holds, for each tile of
``BM`` rows, its expert, its first row and where the expert's rows end, three parts of ``most`` numbers, and
behind these how many tiles there are. Programs walk over tiles, so a grid depends on no count.

Columns of a weight may be paired, a gate and an up column at a time: ``PAIRED`` 0 no, 1 all gates come before
all ups, 2 they alternate. The product of a paired tile has ``2 * BN`` columns, and ``columns`` counts pairs.

What follows the number of tokens is not specialised by: another batch would compile everything again.
"""

import triton
import triton.language as tl

from veomni_hook.kernels.gated_mlp.device import gated, gated_backward

__all__ = [
    "column_sums",
    "combine",
    "gate_up",
    "gate_up_backward",
    "routing_gradient",
    "rows_product",
    "routing_keys",
    "routing_tables",
    "weight_gradient",
]


@triton.jit
def _place(index, m_tiles, n_tiles, GROUP: tl.constexpr):
    """Tile of rows and tile of columns: ``GROUP`` tiles of rows meet one of columns before the next."""
    group = index // (GROUP * n_tiles)
    within = index % (GROUP * n_tiles)
    size = tl.minimum(m_tiles - group * GROUP, GROUP)
    return group * GROUP + within % size, within // size


@triton.jit
def _tile(tiles, most, tile):
    return tl.load(tiles + tile), tl.load(tiles + most + tile), tl.load(tiles + 2 * most + tile)


@triton.jit
def _columns(first, columns, BN: tl.constexpr, PAIRED: tl.constexpr):
    """Where the columns of a tile stand in a row of a weight's products, and which of them exist."""
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
    """Gate and up of a paired tile."""
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
    ``EVEN``: whatever is not read through a descriptor comes in whole tiles.
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
    PAIRED: tl.constexpr, TRANSPOSED: tl.constexpr, X_DESCRIBED: tl.constexpr, W_DESCRIBED: tl.constexpr,
    EVEN: tl.constexpr, BIASED: tl.constexpr, KEEP: tl.constexpr, FORM: tl.constexpr,
    ACTIVATION: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """h [rows, columns] from gathered rows of x, and (``KEEP``) gate and up, as the weight has them.

    ``X_DESCRIBED``: x has its rows in the experts' order already.
    """
    m_tiles = tl.load(tiles + 3 * most)
    n_tiles = tl.cdiv(columns, BN)
    for index in tl.range(tl.program_id(0), m_tiles * n_tiles, tl.num_programs(0), flatten=FLATTEN):
        tile, n = _place(index, m_tiles, n_tiles, GROUP)
        expert, row, end = _tile(tiles, most, tile)
        rows = row + tl.arange(0, BM)
        token = tl.load(tokens + rows, mask=rows < end, other=0).to(tl.int64)
        acc = _product(
            x, token * x_row, row, w, w_expert, w_column, w_inner, expert, n * BN, inner, columns,
            BM, BN, BK, PAIRED, TRANSPOSED, X_DESCRIBED, W_DESCRIBED, EVEN, STAGES,
        )  # fmt: skip
        dtype = h.dtype.element_ty
        if BIASED:
            place, there = _columns(n * BN, columns, BN, PAIRED)
            begin = bias + expert.to(tl.int64) * 2 * columns
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
        gate, up = _parted(pairs, BM, BN, PAIRED)
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
    BIASED: tl.constexpr, WEIGHTED: tl.constexpr, FLATTEN: tl.constexpr, SPECIALIZE: tl.constexpr,
):  # fmt: skip
    """y [rows, columns] from contiguous rows of x, times each row's routing weight if ``WEIGHTED``."""
    m_tiles = tl.load(tiles + 3 * most)
    n_tiles = tl.cdiv(columns, BN)
    for index in tl.range(
        tl.program_id(0), m_tiles * n_tiles, tl.num_programs(0), flatten=FLATTEN, warp_specialize=SPECIALIZE
    ):
        tile, n = _place(index, m_tiles, n_tiles, GROUP)
        expert, row, end = _tile(tiles, most, tile)
        rows = row + tl.arange(0, BM)
        there = rows < end
        # A row that is not there is computed from the tile's first, and not stored.
        x_rows = tl.where(there, rows, row).to(tl.int64) * inner
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
    dh, products, h, rows, rows_there, weight, first, columns, limit, alpha,
    BM: tl.constexpr, BN: tl.constexpr, PAIRED: tl.constexpr, FORM: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """What `gate_up_backward` does with the columns from ``first`` on; returns their sums of dh * h."""
    wide = rows.to(tl.int64)[:, None]
    column = first + tl.arange(0, BN)
    there = rows_there[:, None] & (column < columns)[None, :]
    dtype = h.dtype.element_ty
    begin = products + wide * 2 * columns
    if PAIRED == 1:
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
    if PAIRED == 1:
        tl.store(begin + column[None, :], to_gate.to(dtype), mask=there)
        tl.store(begin + (columns + column)[None, :], to_up.to(dtype), mask=there)
    else:
        both = tl.reshape(tl.join(to_gate.to(dtype), to_up.to(dtype)), (BM, 2 * BN))
        tl.store(begin + place[None, :], both, mask=joint)
    tl.store(h + wide * columns + column[None, :], (y * weight).to(dtype), mask=there)
    return tl.sum(tl.where(there, dh * y, 0.0), axis=1)


@triton.jit
def _gradients_by_parts(
    dh, products, h, rows, rows_there, weight, first, columns, limit, alpha,
    BM: tl.constexpr, BN: tl.constexpr, PAIRED: tl.constexpr, FORM: tl.constexpr, ACTIVATION: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """`_gradients` of one part of the columns after the other.

    A whole tile's gate, up and gradients do not fit into the registers: at 128 x 128 and 8 warps 1.6 KB a
    thread would spill.
    """
    if PARTS == 1:
        sums = _gradients(
            dh, products, h, rows, rows_there, weight, first, columns, limit, alpha,
            BM, BN, PAIRED, FORM, ACTIVATION,
        )  # fmt: skip
    else:
        left, right = _parted(dh, BM, BN // 2, 1)
        sums = _gradients_by_parts(
            left, products, h, rows, rows_there, weight, first, columns, limit, alpha,
            BM, BN // 2, PAIRED, FORM, ACTIVATION, PARTS // 2,
        )  # fmt: skip
        sums += _gradients_by_parts(
            right, products, h, rows, rows_there, weight, first + BN // 2, columns, limit, alpha,
            BM, BN // 2, PAIRED, FORM, ACTIVATION, PARTS // 2,
        )  # fmt: skip
    return sums


@triton.jit(do_not_specialize=["most", "total"])
def gate_up_backward(
    dout, w, products, h, partial, tokens, pairs, weights, tiles, most, inner, columns, total,
    d_row, w_expert, w_column, w_inner, limit, alpha,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
    PAIRED: tl.constexpr, TRANSPOSED: tl.constexpr, X_DESCRIBED: tl.constexpr, W_DESCRIBED: tl.constexpr,
    EVEN: tl.constexpr, PARTS: tl.constexpr, FORM: tl.constexpr, ACTIVATION: tl.constexpr,
    FLATTEN: tl.constexpr,
):  # fmt: skip
    """Puts the gradients of gate and up in their place in ``products``, from gathered rows of dout.

    ``h`` becomes weight * h, rounded once, and ``partial`` [tiles of columns, total] the sums over a tile's
    columns that make the routing weight's gradient.
    """
    m_tiles = tl.load(tiles + 3 * most)
    n_tiles = tl.cdiv(columns, BN)
    for index in tl.range(tl.program_id(0), m_tiles * n_tiles, tl.num_programs(0), flatten=FLATTEN):
        tile, n = _place(index, m_tiles, n_tiles, GROUP)
        expert, row, end = _tile(tiles, most, tile)
        rows = row + tl.arange(0, BM)
        rows_there = rows < end
        token = tl.load(tokens + rows, mask=rows_there, other=0).to(tl.int64)
        dh = _product(
            dout, token * d_row, row, w, w_expert, w_column, w_inner, expert, n * BN, inner, columns,
            BM, BN, BK, 0, TRANSPOSED, X_DESCRIBED, W_DESCRIBED, EVEN, STAGES,
        )  # fmt: skip
        pair = tl.load(pairs + rows, mask=rows_there, other=0)
        weight = tl.load(weights + pair, mask=rows_there, other=0.0).to(tl.float32)
        low = (tl.zeros([1, 1], tl.float32) + limit).to(h.dtype.element_ty).to(tl.float32)
        sums = _gradients_by_parts(
            dh, products, h, rows, rows_there, weight, n * BN, columns, low, alpha,
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

    In the ``LAST`` slab, rows from ``end`` on are zeros: they hold another expert's numbers, or anything.
    """
    if DESCRIBED and not LAST:
        slab = described.load([begin, first])
    else:
        rows = begin + tl.arange(0, BK)
        column = first + tl.arange(0, BLOCK)
        if GATHER:
            # There are more tokens numbered than rows, so that this one needs no mask.
            rows = tl.load(tokens + rows)
        here = x + rows.to(tl.int64)[:, None] * x_row + column[None, :]
        if LAST:
            mask = (begin + tl.arange(0, BK) < end)[:, None] & (column < columns)[None, :]
            slab = tl.load(here, mask=mask, other=0.0)
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
    """out [experts, p_columns, q_columns]: left^T right over an expert's rows, one operand gathered."""
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


@triton.jit(do_not_specialize=["total"])
def routing_keys(ids, keys, total, experts, BLOCK: tl.constexpr):
    """What pairs are sorted by: their expert, or the number of experts for every id that no expert has."""
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = pair < total
    expert = tl.load(ids + pair, mask=there, other=0)
    expert = tl.where((expert >= 0) & (expert < experts), expert, experts)
    tl.store(keys + pair, expert.to(keys.dtype.element_ty), mask=there)


@triton.jit
def _rows_below(keys, expert, total, steps):
    """How many of the sorted keys are less than each of ``expert``."""
    low = tl.zeros_like(expert)
    high = low + total
    for _ in tl.range(0, steps):
        searching = low < high
        middle = (low + high) // 2
        less = tl.load(keys + middle, mask=searching, other=0).to(tl.int32) < expert
        low = tl.where(searching & less, middle + 1, low)
        high = tl.where(searching & (less == 0), middle, high)
    return low


@triton.jit(do_not_specialize=["total", "most", "steps"])
def routing_tables(
    keys, order, tokens, pairs, rows_of, offsets, tiles, total, experts, most, top_k, steps,
    EXPERTS: tl.constexpr, BM: tl.constexpr, BLOCK: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """A block of rows' tokens, pairs and the way back, and a block of tiles.

    Every program finds all offsets for itself, which saves a launch.
    """
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = rows < total
    pair = tl.load(order + rows, mask=there, other=0).to(tl.int32)
    tl.store(pairs + rows, pair, mask=there)
    tl.store(tokens + rows, pair // top_k, mask=there)
    tl.store(rows_of + pair, rows, mask=there)
    expert = tl.arange(0, EXPERTS)
    exists = expert < experts
    # One after the other, the two searches would wait for memory twice as often.
    bounds = tl.minimum(expert[:, None] + tl.arange(0, 2)[None, :], experts)
    begin, end = tl.split(_rows_below(keys, bounds, total, steps))
    ceiling = tl.cumsum((end - begin + BM - 1) // BM, axis=0)
    if tl.program_id(0) == 0:
        tl.store(offsets + expert + 1, end, mask=exists)
        tl.store(offsets, 0)
        tl.store(tiles + 3 * most, tl.max(ceiling, axis=0))
    floor = ceiling - (end - begin + BM - 1) // BM
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    mine = (tile[:, None] >= floor[None, :]) & (tile[:, None] < ceiling[None, :])
    of_tile = tl.sum(tl.where(mine, expert[None, :], 0), axis=1)
    first = tl.sum(tl.where(mine, begin[None, :] + (tile[:, None] - floor[None, :]) * BM, 0), axis=1)
    last = tl.sum(tl.where(mine, end[None, :], 0), axis=1)
    written = tile < most
    tl.store(tiles + tile, of_tile, mask=written)
    tl.store(tiles + most + tile, first, mask=written)
    tl.store(tiles + 2 * most + tile, last, mask=written)


@triton.jit
def _add_place(acc, y, rows_of, weights, first, k, total, column, columns, WEIGHTED: tl.constexpr):
    row = tl.load(rows_of + first + k)
    there = row < total
    values = tl.load(y + row.to(tl.int64) * columns + column, mask=there & (column < columns), other=0.0)
    values = values.to(tl.float32)
    if WEIGHTED:
        values *= tl.load(weights + first + k).to(tl.float32)
    return tl.where(there, acc + values, acc)


@triton.jit
def combine(
    y, out, rows_of, weights, offsets, experts, columns,
    TOP_K: tl.constexpr, UNROLL: tl.constexpr, BLOCK: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """One block of columns of one token: the sum over its places, in their order.

    Places of no expert add nothing.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(offsets + experts)
    first = token * TOP_K
    acc = tl.zeros([BLOCK], tl.float32)
    if UNROLL:
        for k in tl.static_range(TOP_K):
            acc = _add_place(acc, y, rows_of, weights, first, k, total, column, columns, WEIGHTED)
    else:
        for k in tl.range(0, TOP_K):
            acc = _add_place(acc, y, rows_of, weights, first, k, total, column, columns, WEIGHTED)
    tl.store(out + token * columns + column, acc.to(out.dtype.element_ty), mask=column < columns)


@triton.jit(do_not_specialize=["parts", "total"])
def routing_gradient(
    partial, out, rows_of, offsets, ids, dout, bias, experts, parts, total, hidden, d_row,
    TOP_K: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """The gradient of a block of routing weights: the rows' partial sums, and the bias that they scaled."""
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = pair < total
    row = tl.load(rows_of + pair, mask=inside, other=0)
    there = inside & (row < tl.load(offsets + experts))
    acc = tl.zeros([BLOCK], tl.float32)
    here = partial + row
    for _ in tl.range(0, parts):
        acc += tl.load(here, mask=there, other=0.0)
        here += total
    if BIASED:
        expert = tl.load(ids + pair, mask=there, other=0).to(tl.int64)
        token = (pair // TOP_K).to(tl.int64)
        products = tl.zeros([BLOCK, COLUMNS], tl.float32)
        for begin in tl.range(0, hidden, COLUMNS):
            column = begin + tl.arange(0, COLUMNS)
            mask = there[:, None] & (column < hidden)[None, :]
            d = tl.load(dout + token[:, None] * d_row + column[None, :], mask=mask, other=0.0)
            b = tl.load(bias + expert[:, None] * hidden + column[None, :], mask=mask, other=0.0)
            products += d.to(tl.float32) * b.to(tl.float32)
        acc += tl.sum(products, axis=1)
    tl.store(out + pair, tl.where(there, acc, 0.0).to(out.dtype.element_ty), mask=inside)


@triton.jit
def column_sums(
    x, out, tokens, pairs, weights, offsets, columns, x_row,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, GATHER: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """A block of columns of out [experts, columns]: the sum of an expert's rows of x, times weights."""
    expert = tl.program_id(0)
    begin, end = tl.load(offsets + expert), tl.load(offsets + expert + 1)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([ROWS, BLOCK], tl.float32)
    for k in tl.range(begin, end, ROWS):
        rows = k + tl.arange(0, ROWS)
        there = rows < end
        where = rows
        if GATHER:
            where = tl.load(tokens + rows, mask=there, other=0)
        mask = there[:, None] & (column < columns)[None, :]
        here = x + where.to(tl.int64)[:, None] * x_row + column[None, :]
        values = tl.load(here, mask=mask, other=0.0).to(tl.float32)
        if WEIGHTED:
            pair = tl.load(pairs + rows, mask=there, other=0)
            values *= tl.load(weights + pair, mask=there, other=0.0).to(tl.float32)[:, None]
        acc += values
    below = out + expert.to(tl.int64) * columns + column
    tl.store(below, tl.sum(acc, axis=0).to(out.dtype.element_ty), mask=column < columns)
