"""Device code of experts' products; `veomni_hook.kernels.moe_experts.triton_products` launches it.

Forward:  `gate_up`           h = gate(g, u), [g, u] = x[token] U_e + u_e
          `rows_product`      y = h D_e + d_e
Backward: `gate_up_backward`  dh = dout[token] D_e';  [dg, du] = gate'(g, u) (w dh);  <dh, h>;  w h
          `rows_product`      rows of dx = [dg, du] U_e'
          `veomni_hook.kernels.moe_experts.weight_gradient_device`: dU_e, dD_e
          `.gluon_backward_device`, `.gluon_weight_gradient_device`: the same for Hopper, see `gluon_choice`
Grid: (programs,) for every kernel. Programs loop over tiles, so the grid does not depend on counts.

Shapes: T tokens of H numbers with K places each; E experts; R = T * K rows, one for each (token, place) pair,
sorted by expert; I columns of h; W columns of the first product: 2I if ``PAIRED``, else I. D is the dtype of
products' operands: 16-bit, or float32. Sums are in float32.

``tiles`` holds, for each tile of ``BM`` rows, its expert, its first row and the end of the expert's rows, in
three parts of ``max_tiles`` numbers, followed by the number of tiles.

BM, BN, BK, GROUP, STAGES, FLATTEN, PARTS: rows, columns, depth and more of a tile, see `triton_tiles.Tile`.
PAIRED: columns of the first weight are pairs of one gate and one up: 0 no, 1 all gates before all ups, 2
    alternating. The product of a paired tile has ``2 * BN`` columns, and ``columns`` counts pairs. If it is
    0, there is a gate and no up.
TRANSPOSED: a weight is [E, inner, columns] instead of [E, columns, inner].
ORDERED: one operand's rows are in experts' order [R], not in tokens' order [T], so they are not gathered.
X_DESCRIBED, W_DESCRIBED: the operand is a tensor descriptor, not a pointer.
EVEN: everything that is not read through a descriptor comes in whole tiles.
FORM, ACTIVATION: the gate, by the numbers of `veomni_hook.kernels.gated_mlp.device`.
RANK: unless 0, ``low`` times ``low_w`` is added to the product, see `.adapter_device`.
SCALED: operands are in float8. 1: what the product has for a row is multiplied by ``x_scale`` [T], or [R] if
    ORDERED, and for a column by ``w_scale`` [E, columns], both float32. 2: MX, where both end in inner / 32
    and are bytes (`veomni_hook.kernels.float8.reference`).

Arguments that depend on the number of tokens are not specialised, so a new batch size recompiles nothing.
They are not grouped into tuples: Triton 3.2 accepts none, and with 3.6 a launch of 32 arguments took the host
63 us instead of 41, because it inspects each item of a tuple.
"""

import triton
import triton.language as tl

from veomni_hook.kernels.gated_mlp.device import gated, gated_backward
from veomni_hook.kernels.moe_experts.adapter_device import add_low_rank

__all__ = ["gate_up", "gate_up_backward", "read_tile", "rows_product", "scales", "tile_at"]


@triton.jit
def tile_at(index, m_tiles, n_tiles, GROUP: tl.constexpr):
    """A program's tile of rows and of columns: ``GROUP`` of rows use one of columns before the next."""
    group = index // (GROUP * n_tiles)
    within = index % (GROUP * n_tiles)
    size = tl.minimum(m_tiles - group * GROUP, GROUP)
    return group * GROUP + within % size, within // size


@triton.jit
def read_tile(tiles, max_tiles, m):
    """The expert of a tile of rows, the tile's first row, and the end of the expert's rows."""
    return tl.load(tiles + m), tl.load(tiles + max_tiles + m), tl.load(tiles + 2 * max_tiles + m)


@triton.jit
def _rows_of_x(tokens, rows, first_row, end, ORDERED: tl.constexpr):
    """The rows of x that a tile reads: its own rows if ``ORDERED``, else those of their tokens.

    A row past the end is computed from an existing row and not stored.
    """
    if ORDERED:
        x_rows = tl.where(rows < end, rows, first_row).to(tl.int64)
    else:
        x_rows = tl.load(tokens + rows, mask=rows < end, other=0).to(tl.int64)
    return x_rows


@triton.jit
def _columns(first, columns, BN: tl.constexpr, PAIRED: tl.constexpr):
    """The positions of a tile's columns in a row of a weight's products, and which of them exist."""
    if PAIRED == 0:
        position = first + tl.arange(0, BN)
        exists = position < columns
    elif PAIRED == 1:
        lane = tl.arange(0, 2 * BN)
        pair = first + lane % BN
        position = pair + (lane // BN) * columns
        exists = pair < columns
    else:
        position = 2 * first + tl.arange(0, 2 * BN)
        exists = position < 2 * columns
    return position, exists


@triton.jit
def _parted(pairs, BM: tl.constexpr, BN: tl.constexpr, PAIRED: tl.constexpr):
    """Split a paired tile into gate and up."""
    if PAIRED == 1:
        gate, up = tl.split(tl.permute(tl.reshape(pairs, (BM, 2, BN)), (0, 2, 1)))
    else:
        gate, up = tl.split(tl.reshape(pairs, (BM, BN, 2)))
    return gate, up


@triton.jit
def scales(scale, rows, exist, k, inner, BK: tl.constexpr):
    """The bytes of the scales of a slab of ``rows`` in MX, from column ``k`` on, [rows, BK / 32]."""
    part = k // 32 + tl.arange(0, BK // 32)[None, :]
    pointers = scale + rows[:, None] * (inner // 32) + part
    return tl.load(pointers, mask=exist & (part < inner // 32), other=0)


@triton.jit
def _dot(
    a, b, acc, x_scale, x_rows, w_scale, first, position, exists, k, inner,
    BK: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """``acc`` plus the product of two slabs; ``first`` is the first column of the expert's."""
    if SCALED == 2:
        column = first + position
        of_a = scales(x_scale, x_rows, k < inner, k, inner, BK)
        of_b = scales(w_scale, column, exists[:, None], k, inner, BK)
        acc = tl.dot_scaled(a, of_a, "e4m3", b, of_b, "e4m3", acc)
    else:
        acc = tl.dot(a, b, acc, input_precision="ieee")
    return acc


@triton.jit
def _product(
    x,  # D: a pointer to rows, or a descriptor of contiguous rows, which is read from ``first_row`` on
    x_rows, stride_x_row,  # [BM], int64: numbers of rows
    first_row,
    w,  # [E, columns, inner] or TRANSPOSED, D: a pointer or a descriptor
    stride_w_expert, stride_w_column, stride_w_inner, expert, first_column, inner, columns,
    x_scale, w_scale,  # as SCALED says
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PAIRED: tl.constexpr, TRANSPOSED: tl.constexpr,
    X_DESCRIBED: tl.constexpr, W_DESCRIBED: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr,
    SCALED: tl.constexpr,
):  # fmt: skip
    """A tile of rows of x times a tile of columns of the expert's weight, in float32."""
    WIDE: tl.constexpr = BN if PAIRED == 0 else 2 * BN
    LEAD: tl.constexpr = 2 if PAIRED == 1 else 1
    STEP: tl.constexpr = 2 if PAIRED == 2 else 1
    lane = tl.arange(0, BK)
    position, exists = _columns(first_column, columns, BN, PAIRED)
    first = expert.to(tl.int64) * (1 if PAIRED == 0 else 2) * columns
    if not X_DESCRIBED:
        x_pointers = x + (x_rows * stride_x_row)[:, None] + lane[None, :]
    if not W_DESCRIBED:
        w_pointers = w + expert.to(tl.int64) * stride_w_expert
        w_pointers += position.to(tl.int64)[None, :] * stride_w_column
    acc = tl.zeros([BM, WIDE], tl.float32)
    for k in tl.range(0, inner, BK, num_stages=STAGES):
        if X_DESCRIBED:
            a = x.load([first_row, k])
        elif EVEN:
            a = tl.load(x_pointers + k)
        else:
            a = tl.load(x_pointers + k, mask=lane[None, :] < inner - k, other=0.0)
        if W_DESCRIBED:
            if TRANSPOSED:
                b = tl.reshape(w.load([expert, k, first_column * STEP]), (BK, WIDE))
            else:
                b = tl.trans(tl.reshape(w.load([expert * LEAD, first_column * STEP, k]), (WIDE, BK)))
        elif EVEN:
            b = tl.load(w_pointers + (k + lane).to(tl.int64)[:, None] * stride_w_inner)
        else:
            b = tl.load(
                w_pointers + (k + lane).to(tl.int64)[:, None] * stride_w_inner,
                mask=(lane[:, None] < inner - k) & exists[None, :],
                other=0.0,
            )
        acc = _dot(a, b, acc, x_scale, x_rows, w_scale, first, position, exists, k, inner, BK, SCALED)
    if SCALED == 1:
        of_columns = tl.load(w_scale + first + position, mask=exists, other=0.0)
        acc = acc * tl.load(x_scale + x_rows)[:, None] * of_columns[None, :]
    return acc


@triton.jit(do_not_specialize=["max_tiles"])
def gate_up(
    x,  # [T, H], or [R, H] if ORDERED, D: a pointer or a descriptor
    w,  # [E, W, H], or [E, H, W] if TRANSPOSED, D: weights of gate and up; a pointer or a descriptor
    bias,  # [E, W], float: of gate and up; read if BIASED
    h,  # [R, I], D: gate(g, u); written
    products,  # [R, W], D: g and u in the weight's column order; written if KEEP
    tokens,  # [R], int32: the token of a row; read unless ORDERED
    tiles,  # [3 * max_tiles + 1], int32
    max_tiles, inner, columns,  # inner is H, columns is I
    stride_x_row, stride_w_expert, stride_w_column, stride_w_inner,
    limit, alpha,  # of the gate, float
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
    PAIRED: tl.constexpr, TRANSPOSED: tl.constexpr, ORDERED: tl.constexpr, X_DESCRIBED: tl.constexpr,
    W_DESCRIBED: tl.constexpr, EVEN: tl.constexpr, BIASED: tl.constexpr, KEEP: tl.constexpr,
    FORM: tl.constexpr, ACTIVATION: tl.constexpr, FLATTEN: tl.constexpr,
    low=None, low_w=None, RANK: tl.constexpr = 0, TURNED: tl.constexpr = 0,
    x_scale=None, w_scale=None, SCALED: tl.constexpr = 0,
):  # fmt: skip
    """h = gate(g, u), [g, u] = x[token] U_e + u_e; g and u are rounded to D first.

    Grid: (programs,) over tiles of BM rows and BN pairs of columns. ``KEEP``: also store g and u.
    """
    m_tiles = tl.load(tiles + 3 * max_tiles)
    n_tiles = tl.cdiv(columns, BN)
    for index in tl.range(tl.program_id(0), m_tiles * n_tiles, tl.num_programs(0), flatten=FLATTEN):
        m, n = tile_at(index, m_tiles, n_tiles, GROUP)
        expert, first_row, end = read_tile(tiles, max_tiles, m)
        rows = first_row + tl.arange(0, BM)
        x_rows = _rows_of_x(tokens, rows, first_row, end, ORDERED)
        acc = _product(
            x, x_rows, stride_x_row, first_row, w, stride_w_expert, stride_w_column, stride_w_inner, expert,
            n * BN, inner, columns, x_scale, w_scale, BM, BN, BK, PAIRED, TRANSPOSED, X_DESCRIBED,
            W_DESCRIBED, EVEN, STAGES, SCALED,
        )  # fmt: skip
        if RANK > 0:
            position, exists = _columns(n * BN, columns, BN, PAIRED)
            width = (1 if PAIRED == 0 else 2) * columns
            acc = add_low_rank(
                acc, low, low_w, rows, rows < end, expert, position, exists, width, RANK, TURNED
            )
        dtype = h.dtype.element_ty
        if BIASED:
            position, exists = _columns(n * BN, columns, BN, PAIRED)
            bias_row = bias + expert.to(tl.int64) * (1 if PAIRED == 0 else 2) * columns
            acc += tl.load(bias_row + position, mask=exists, other=0.0).to(tl.float32)[None, :]
        row_mask = (rows < end)[:, None]
        rows64 = rows.to(tl.int64)[:, None]
        column = n * BN + tl.arange(0, BN)
        mask = row_mask & (column < columns)[None, :]
        pairs = acc.to(dtype)
        if KEEP and PAIRED == 2:
            position, exists = _columns(n * BN, columns, BN, PAIRED)
            both = products + rows64 * 2 * columns + position[None, :]
            tl.store(both, pairs, mask=row_mask & exists[None, :])
        if PAIRED == 0:
            gate, up = pairs, pairs
        else:
            gate, up = _parted(pairs, BM, BN, PAIRED)
        if KEEP and PAIRED == 0:
            tl.store(products + rows64 * columns + column[None, :], gate, mask=mask)
        if KEEP and PAIRED == 1:
            tl.store(products + rows64 * 2 * columns + column[None, :], gate, mask=mask)
            tl.store(products + rows64 * 2 * columns + (columns + column)[None, :], up, mask=mask)
        rounded_limit = (tl.zeros([1, 1], tl.float32) + limit).to(dtype).to(tl.float32)
        y = gated(gate.to(tl.float32), up.to(tl.float32), rounded_limit, alpha, FORM, ACTIVATION, tl.float32)
        tl.store(h + rows64 * columns + column[None, :], y.to(dtype), mask=mask)


@triton.jit(do_not_specialize=["max_tiles"])
def rows_product(
    x,  # [R, inner], or [T, inner] unless ORDERED, contiguous, D: a pointer or a descriptor
    w,  # [E, columns, inner] or TRANSPOSED, D: a pointer or a descriptor
    bias,  # [E, columns], float: read if BIASED
    y,  # [R, columns], D: written
    tokens,  # [R], int32: the token of a row; read unless ORDERED
    pairs,  # [R], int32: the pair of a row; read if WEIGHTED
    weights,  # [T, K], float: routing weights of pairs; read if WEIGHTED
    tiles,  # [3 * max_tiles + 1], int32
    max_tiles, inner, columns,  # inner and columns are I and H, in backward W and H
    stride_w_expert, stride_w_column, stride_w_inner,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
    TRANSPOSED: tl.constexpr, ORDERED: tl.constexpr, X_DESCRIBED: tl.constexpr, W_DESCRIBED: tl.constexpr,
    EVEN: tl.constexpr, BIASED: tl.constexpr, WEIGHTED: tl.constexpr, FLATTEN: tl.constexpr,
    low=None, low_w=None, RANK: tl.constexpr = 0, TURNED: tl.constexpr = 0,
    x_scale=None, w_scale=None, SCALED: tl.constexpr = 0,
):  # fmt: skip
    """y = x D_e + d_e, times the routing weight of the row if ``WEIGHTED``, rounded once.

    In backward it computes the rows of dx = [dg, du] U_e', with TRANSPOSED negated and no bias, and in float8
    dh = dout[token] D_e' likewise.
    Grid: (programs,) over tiles of BM rows and BN columns.
    """
    m_tiles = tl.load(tiles + 3 * max_tiles)
    n_tiles = tl.cdiv(columns, BN)
    for index in tl.range(tl.program_id(0), m_tiles * n_tiles, tl.num_programs(0), flatten=FLATTEN):
        m, n = tile_at(index, m_tiles, n_tiles, GROUP)
        expert, first_row, end = read_tile(tiles, max_tiles, m)
        rows = first_row + tl.arange(0, BM)
        row_mask = rows < end
        x_rows = _rows_of_x(tokens, rows, first_row, end, ORDERED)
        acc = _product(
            x, x_rows, inner, first_row, w, stride_w_expert, stride_w_column, stride_w_inner, expert, n * BN,
            inner, columns, x_scale, w_scale, BM, BN, BK, 0, TRANSPOSED, X_DESCRIBED, W_DESCRIBED, EVEN,
            STAGES, SCALED,
        )  # fmt: skip
        column = n * BN + tl.arange(0, BN)
        if RANK > 0:
            acc = add_low_rank(
                acc, low, low_w, rows, row_mask, expert, column, column < columns, columns, RANK, TURNED
            )
        if BIASED:
            bias_row = bias + expert.to(tl.int64) * columns
            acc += tl.load(bias_row + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
        if WEIGHTED:
            pair = tl.load(pairs + rows, mask=row_mask, other=0)
            acc *= tl.load(weights + pair, mask=row_mask, other=0.0).to(tl.float32)[:, None]
        y_pointers = y + rows.to(tl.int64)[:, None] * columns + column[None, :]
        mask = row_mask[:, None] & (column < columns)[None, :]
        tl.store(y_pointers, acc.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _gradients(
    dh,  # [BM, BN], float32: the tile itself, not a pointer
    products, gradients, h,  # as in `gate_up_backward`
    rows, row_mask, weight,  # [BM]: numbers of rows, whether they exist, their routing weights in float32
    first_column, columns, limit, alpha,
    BM: tl.constexpr, BN: tl.constexpr, PAIRED: tl.constexpr, FORM: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Process the columns from ``first_column`` on for `gate_up_backward`; return their sums of dh * h."""
    rows64 = rows.to(tl.int64)[:, None]
    column = first_column + tl.arange(0, BN)
    mask = row_mask[:, None] & (column < columns)[None, :]
    dtype = h.dtype.element_ty
    products_row = products + rows64 * (1 if PAIRED == 0 else 2) * columns
    gradients_row = gradients + rows64 * (1 if PAIRED == 0 else 2) * columns
    if PAIRED == 0:
        gate = tl.load(products_row + column[None, :], mask=mask, other=0.0)
        up = gate
    elif PAIRED == 1:
        gate = tl.load(products_row + column[None, :], mask=mask, other=0.0)
        up = tl.load(products_row + (columns + column)[None, :], mask=mask, other=0.0)
    else:
        position, exists = _columns(first_column, columns, BN, PAIRED)
        pair_mask = row_mask[:, None] & exists[None, :]
        pairs = tl.load(products_row + position[None, :], mask=pair_mask, other=0.0)
        gate, up = _parted(pairs, BM, BN, PAIRED)
    weight = weight[:, None]
    dgate, dup, y = gated_backward(
        gate.to(tl.float32), up.to(tl.float32), dh * weight, limit, alpha, FORM, ACTIVATION, tl.float32
    )
    if PAIRED == 2:
        both = tl.reshape(tl.join(dgate.to(dtype), dup.to(dtype)), (BM, 2 * BN))
        tl.store(gradients_row + position[None, :], both, mask=pair_mask)
    else:
        tl.store(gradients_row + column[None, :], dgate.to(dtype), mask=mask)
    if PAIRED == 1:
        tl.store(gradients_row + (columns + column)[None, :], dup.to(dtype), mask=mask)
    tl.store(h + rows64 * columns + column[None, :], (y * weight).to(dtype), mask=mask)
    return tl.sum(tl.where(mask, dh * y, 0.0), axis=1)


@triton.jit
def _gradients_by_parts(
    dh, products, gradients, h, rows, row_mask, weight, first_column, columns, limit, alpha,
    BM: tl.constexpr, BN: tl.constexpr, PAIRED: tl.constexpr, FORM: tl.constexpr, ACTIVATION: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Run `_gradients` on one part of the columns at a time.

    A whole tile's gate, up and gradients do not fit into registers: at 128 x 128 with 8 warps, each thread
    would spill 1.6 KB.
    """
    if PARTS == 1:
        sums = _gradients(
            dh, products, gradients, h, rows, row_mask, weight, first_column, columns, limit, alpha,
            BM, BN, PAIRED, FORM, ACTIVATION,
        )  # fmt: skip
    else:
        left, right = _parted(dh, BM, BN // 2, 1)
        sums = _gradients_by_parts(
            left, products, gradients, h, rows, row_mask, weight, first_column, columns, limit, alpha,
            BM, BN // 2, PAIRED, FORM, ACTIVATION, PARTS // 2,
        )  # fmt: skip
        sums += _gradients_by_parts(
            right, products, gradients, h, rows, row_mask, weight, first_column + BN // 2, columns, limit,
            alpha, BM, BN // 2, PAIRED, FORM, ACTIVATION, PARTS // 2,
        )  # fmt: skip
    return sums


@triton.jit(do_not_specialize=["max_tiles", "num_pairs"])
def gate_up_backward(
    dout,  # [T, H], or [R, H] if ORDERED, D: the result's gradient; a pointer or a descriptor
    w,  # [E, I, H], or [E, H, I] if TRANSPOSED, D: the second product's weight; a pointer or a descriptor
    products,  # [R, W], D: g and u, as `gate_up` kept them
    gradients,  # [R, W], D: dg and du; written; may be ``products`` itself
    h,  # [R, I], D: w h, rounded once; written
    partial,  # [n_tiles, R], float32: a tile's sums of dh * h, for the routing weight's gradient; written
    tokens,  # [R], int32: the token of a row; read unless ORDERED
    pairs,  # [R], int32: the pair of a row
    weights,  # [T, K], float: routing weights of pairs
    tiles,  # [3 * max_tiles + 1], int32
    max_tiles, inner, columns, num_pairs,  # inner is H, columns is I, num_pairs is R
    stride_dout_row, stride_w_expert, stride_w_column, stride_w_inner,
    limit, alpha,  # of the gate, float
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
    PAIRED: tl.constexpr, TRANSPOSED: tl.constexpr, ORDERED: tl.constexpr, X_DESCRIBED: tl.constexpr,
    W_DESCRIBED: tl.constexpr, EVEN: tl.constexpr, PARTS: tl.constexpr, FORM: tl.constexpr,
    ACTIVATION: tl.constexpr, FLATTEN: tl.constexpr,
    low=None, low_w=None, RANK: tl.constexpr = 0, TURNED: tl.constexpr = 0,
    x_scale=None, w_scale=None, SCALED: tl.constexpr = 0,
):  # fmt: skip
    """dh = dout[token] D_e';  [dg, du] = gate'(g, u) (w dh);  the sums <dh, h>;  w h with h = gate(g, u).

    Grid: (programs,) over tiles of BM rows and BN columns of h. PAIRED is about ``products``, not ``w``.
    X_DESCRIBED is about ``dout``.
    """
    m_tiles = tl.load(tiles + 3 * max_tiles)
    n_tiles = tl.cdiv(columns, BN)
    for index in tl.range(tl.program_id(0), m_tiles * n_tiles, tl.num_programs(0), flatten=FLATTEN):
        m, n = tile_at(index, m_tiles, n_tiles, GROUP)
        expert, first_row, end = read_tile(tiles, max_tiles, m)
        rows = first_row + tl.arange(0, BM)
        row_mask = rows < end
        dout_rows = _rows_of_x(tokens, rows, first_row, end, ORDERED)
        dh = _product(
            dout, dout_rows, stride_dout_row, first_row, w, stride_w_expert, stride_w_column, stride_w_inner,
            expert, n * BN, inner, columns, x_scale, w_scale, BM, BN, BK, 0, TRANSPOSED, X_DESCRIBED,
            W_DESCRIBED, EVEN, STAGES, SCALED,
        )  # fmt: skip
        column = n * BN + tl.arange(0, BN)
        if RANK > 0:
            dh = add_low_rank(
                dh, low, low_w, rows, row_mask, expert, column, column < columns, columns, RANK, TURNED
            )
        pair = tl.load(pairs + rows, mask=row_mask, other=0)
        weight = tl.load(weights + pair, mask=row_mask, other=0.0).to(tl.float32)
        rounded_limit = (tl.zeros([1, 1], tl.float32) + limit).to(h.dtype.element_ty).to(tl.float32)
        sums = _gradients_by_parts(
            dh, products, gradients, h, rows, row_mask, weight, n * BN, columns, rounded_limit, alpha,
            BM, BN, PAIRED, FORM, ACTIVATION, PARTS,
        )  # fmt: skip
        tl.store(partial + n.to(tl.int64) * num_pairs + rows, sums, mask=row_mask)
