"""Device code that sorts pairs by expert and combines rows' results per token.

`veomni_hook.kernels.moe_experts.triton_routing` and `.triton_products` launch it.

Forward:  `routing_keys`, a stable sort, `routing_tables`: the tables of rows and tiles
          `routing_of_few`  the same tables of few pairs in one launch
          `combine`          result_t = sum over k of w y
Backward: `combine`          dx_t = sum over k of the rows of dx
          `routing_gradient` dw = <dh, h> + <dout[token], d_e>
          `column_sums`      du_e = sum of [dg, du];  dd_e = sum of w dout[token], over the rows of an expert

Shapes: T tokens with K places each; R = T * K pairs, and as many rows, which are pairs sorted by expert;
E experts; H hidden columns. Rows from ``offsets[E]`` on belong to pairs without an expert. Tables are int32;
`.device` defines tiles. Sums are in float32.
"""

import triton
import triton.language as tl

__all__ = [
    "column_sums",
    "combine",
    "routing_gradient",
    "routing_keys",
    "routing_of_few",
    "routing_tables",
]


@triton.jit
def _keys(ids, pair, mask, num_experts):
    """key = id if 0 <= id < E, else E."""
    expert = tl.load(ids + pair, mask=mask, other=0)
    return tl.where((expert >= 0) & (expert < num_experts), expert, num_experts)


@triton.jit(do_not_specialize=["num_pairs"])
def routing_keys(
    ids,  # [T, K], integer: the expert of a pair, as the router chose
    keys,  # [R], integer: the key of a pair; written
    num_pairs, num_experts,  # R, E
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write `_keys`. Grid: (ceil(R / BLOCK),)."""
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = pair < num_pairs
    tl.store(keys + pair, _keys(ids, pair, mask, num_experts).to(keys.dtype.element_ty), mask=mask)


@triton.jit
def _rows_below(keys, expert, num_pairs, steps):
    """The number of sorted keys below each of ``expert``, by a binary search of ``steps`` steps."""
    low = tl.zeros_like(expert)
    high = low + num_pairs
    for _ in tl.range(0, steps):
        searching = low < high
        middle = (low + high) // 2
        less = tl.load(keys + middle, mask=searching, other=0).to(tl.int32) < expert
        low = tl.where(searching & less, middle + 1, low)
        high = tl.where(searching & (less == 0), middle, high)
    return low


@triton.jit
def _write_tiles(
    begin, end,  # [EXPERTS], int32: the first row of each expert, and the row after its last one
    offsets, experts, tiles, num_experts, max_tiles,
    EXPERTS: tl.constexpr, BM: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Fill the program's TILES tiles and the places of TILES experts; the first program also the offsets."""
    expert = tl.arange(0, EXPERTS)
    tiles_end = tl.cumsum((end - begin + BM - 1) // BM, axis=0)
    if tl.program_id(0) == 0:
        tl.store(offsets + expert + 1, end, mask=expert < num_experts)
        tl.store(offsets, 0)
        tl.store(tiles + 3 * max_tiles, tl.max(tiles_end, axis=0))
    tiles_begin = tiles_end - (end - begin + BM - 1) // BM
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    of_expert = (tile[:, None] >= tiles_begin[None, :]) & (tile[:, None] < tiles_end[None, :])
    expert_of_tile = tl.sum(tl.where(of_expert, expert[None, :], 0), axis=1)
    row_of_tile = begin[None, :] + (tile[:, None] - tiles_begin[None, :]) * BM
    first_row = tl.sum(tl.where(of_expert, row_of_tile, 0), axis=1)
    end_of_expert = tl.sum(tl.where(of_expert, end[None, :], 0), axis=1)
    tile_mask = tile < max_tiles
    tl.store(tiles + tile, expert_of_tile, mask=tile_mask)
    tl.store(tiles + max_tiles + tile, first_row, mask=tile_mask)
    tl.store(tiles + 2 * max_tiles + tile, end_of_expert, mask=tile_mask)
    # The same numbers are experts now. Place: how many have more rows, or as many and a smaller number.
    same = tile[:, None] == expert[None, :]
    rows = (end - begin)[None, :]
    own = tl.sum(tl.where(same, rows, 0), axis=1)[:, None]
    earlier = (rows > own) | ((rows == own) & (expert[None, :] < tile[:, None]))
    place = experts + tl.sum(earlier.to(tl.int32), axis=1)
    mask = tile < num_experts
    tl.store(place, tile, mask=mask)
    tl.store(place + num_experts, tl.sum(tl.where(same, begin[None, :], 0), axis=1), mask=mask)
    tl.store(place + 2 * num_experts, tl.sum(tl.where(same, end[None, :], 0), axis=1), mask=mask)
    tl.store(place + 3 * num_experts, tl.sum(tl.where(same, tiles_begin[None, :], 0), axis=1), mask=mask)


@triton.jit(do_not_specialize=["num_pairs", "max_tiles", "steps"])
def routing_tables(
    keys,  # [R], integer: sorted keys
    order,  # [R], int64: the pair of each sorted key
    tokens,  # [R], int32: the token of a row; written
    pairs,  # [R], int32: the pair of a row; written
    rows_of,  # [R], int32: the row of a pair; written
    offsets,  # [E + 1], int32: the first row of each expert, and the end of the last one; written
    experts,  # [4 E], int32: expert, first row, end and first tile, those with most rows first; written
    tiles,  # [3 * max_tiles + 1], int32: expert, first row and end of each tile, then their number; written
    num_pairs, num_experts, max_tiles, top_k, steps,  # R, E, …, K, steps of a binary search in R keys
    EXPERTS: tl.constexpr, BM: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Fill BLOCK rows of tokens, pairs and rows_of, and TILES tiles of BM rows.

    Grid: (max(ceil(R / BLOCK), ceil(max(max_tiles, E) / TILES)),). Each program computes the offsets of all
    EXPERTS (a power of two) itself, which saves a launch; the first one stores them.
    """
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = rows < num_pairs
    pair = tl.load(order + rows, mask=mask, other=0).to(tl.int32)
    tl.store(pairs + rows, pair, mask=mask)
    tl.store(tokens + rows, pair // top_k, mask=mask)
    tl.store(rows_of + pair, rows, mask=mask)
    expert = tl.arange(0, EXPERTS)
    # Both searches at once: one after the other, they would wait for memory twice as often.
    bounds = tl.minimum(expert[:, None] + tl.arange(0, 2)[None, :], num_experts)
    begin, end = tl.split(_rows_below(keys, bounds, num_pairs, steps))
    _write_tiles(begin, end, offsets, experts, tiles, num_experts, max_tiles, EXPERTS, BM, TILES)


@triton.jit(do_not_specialize=["num_pairs", "max_tiles"])
def routing_of_few(
    ids,  # [T, K], integer: the expert of a pair, as the router chose
    tokens, pairs, rows_of, offsets, experts, tiles,  # as in `routing_tables`; written
    num_pairs, num_experts, max_tiles, top_k,  # R, E, …, K
    EXPERTS: tl.constexpr, BM: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Fill BLOCK pairs' places in tokens, pairs and rows_of, and TILES tiles of BM rows.

    A pair's row is the number of pairs that a stable sort by `_keys` puts before it. Each program compares
    its pairs and all EXPERTS (a power of two) with all pairs, CHUNK at a time, so programs need nothing from
    one another. Grid: (max(ceil(R / BLOCK), ceil(max(max_tiles, E) / TILES)),).
    """
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = pair < num_pairs
    key = _keys(ids, pair, mask, num_experts).to(tl.int32)
    expert = tl.arange(0, EXPERTS)
    row = tl.zeros([BLOCK], tl.int32)
    begin = tl.zeros([EXPERTS], tl.int32)
    end = tl.zeros([EXPERTS], tl.int32)
    for start in tl.range(0, num_pairs, CHUNK):
        other = start + tl.arange(0, CHUNK)
        exists = other < num_pairs
        # What does not exist comes after every pair.
        other_key = tl.where(exists, _keys(ids, other, exists, num_experts).to(tl.int32), num_experts + 1)
        same = other_key[None, :] == key[:, None]
        before = (other_key[None, :] < key[:, None]) | (same & (other[None, :] < pair[:, None]))
        row += tl.sum(before.to(tl.int32), axis=1)
        begin += tl.sum((other_key[None, :] < expert[:, None]).to(tl.int32), axis=1)
        end += tl.sum((other_key[None, :] <= expert[:, None]).to(tl.int32), axis=1)
    tl.store(pairs + row, pair, mask=mask)
    tl.store(tokens + row, pair // top_k, mask=mask)
    tl.store(rows_of + pair, row, mask=mask)
    # Pairs without an expert have no tile.
    end = tl.where(expert < num_experts, end, begin)
    _write_tiles(begin, end, offsets, experts, tiles, num_experts, max_tiles, EXPERTS, BM, TILES)


@triton.jit
def _add_place(acc, y, rows_of, weights, first_pair, k, end, column, columns, WEIGHTED: tl.constexpr):
    """Place ``k``'s row of y, times its weight if ``WEIGHTED``, added to ``acc`` if it has an expert."""
    row = tl.load(rows_of + first_pair + k)
    has_expert = row < end
    mask = has_expert & (column < columns)
    values = tl.load(y + row.to(tl.int64) * columns + column, mask=mask, other=0.0).to(tl.float32)
    if WEIGHTED:
        values *= tl.load(weights + first_pair + k).to(tl.float32)
    return tl.where(has_expert, acc + values, acc)


@triton.jit
def combine(
    y,  # [R, H], contiguous, 16-bit or float32: rows to sum
    out,  # [T, H], float, the columns are neighbours: written
    rows_of,  # [R], int32: the row of a pair
    weights,  # [T, K], float: routing weights of pairs; read if WEIGHTED
    offsets,  # [E + 1], int32: the last one is the number of rows with an expert
    num_experts, columns, stride_out,  # E, H
    TOP_K: tl.constexpr, UNROLL: tl.constexpr, BLOCK: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """out_t = sum over the TOP_K places of token t, in order, of w y; w is 1 unless ``WEIGHTED``.

    Places without an expert add nothing. Grid: (T, ceil(H / BLOCK)).
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    end = tl.load(offsets + num_experts)
    first_pair = token * TOP_K
    acc = tl.zeros([BLOCK], tl.float32)
    if UNROLL:
        for k in tl.static_range(TOP_K):
            acc = _add_place(acc, y, rows_of, weights, first_pair, k, end, column, columns, WEIGHTED)
    else:
        for k in tl.range(0, TOP_K):
            acc = _add_place(acc, y, rows_of, weights, first_pair, k, end, column, columns, WEIGHTED)
    tl.store(out + token * stride_out + column, acc.to(out.dtype.element_ty), mask=column < columns)


@triton.jit(do_not_specialize=["parts", "num_pairs"])
def routing_gradient(
    partial,  # [parts, R], float32: sums of dh * h of rows, by `device.gate_up_backward`
    out,  # [T, K], float: dw; written
    rows_of,  # [R], int32: the row of a pair
    offsets,  # [E + 1], int32: the last one is the number of rows with an expert
    ids,  # [T, K], integer: the expert of a pair; read if BIASED
    dout,  # [T, H], 16-bit or float32: the result's gradient; read if BIASED
    bias,  # [E, H], float: d_e, the second product's bias; read if BIASED
    num_experts, parts, num_pairs, hidden,  # E, …, R, H
    stride_dout_row,
    TOP_K: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """dw = sum of the pair's partial sums, plus <dout[token], d_e> if ``BIASED``; 0 without an expert.

    Grid: (ceil(R / BLOCK),). COLUMNS: columns of dout and bias that are read at once.
    """
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    pair_mask = pair < num_pairs
    row = tl.load(rows_of + pair, mask=pair_mask, other=0)
    has_expert = pair_mask & (row < tl.load(offsets + num_experts))
    acc = tl.zeros([BLOCK], tl.float32)
    part = partial + row
    for _ in tl.range(0, parts):
        acc += tl.load(part, mask=has_expert, other=0.0)
        part += num_pairs
    if BIASED:
        expert = tl.load(ids + pair, mask=has_expert, other=0).to(tl.int64)
        token = (pair // TOP_K).to(tl.int64)
        products = tl.zeros([BLOCK, COLUMNS], tl.float32)
        for begin in tl.range(0, hidden, COLUMNS):
            column = begin + tl.arange(0, COLUMNS)
            mask = has_expert[:, None] & (column < hidden)[None, :]
            d = tl.load(dout + token[:, None] * stride_dout_row + column[None, :], mask=mask, other=0.0)
            b = tl.load(bias + expert[:, None] * hidden + column[None, :], mask=mask, other=0.0)
            products += d.to(tl.float32) * b.to(tl.float32)
        acc += tl.sum(products, axis=1)
    tl.store(out + pair, tl.where(has_expert, acc, 0.0).to(out.dtype.element_ty), mask=pair_mask)


@triton.jit
def column_sums(
    x,  # [R, columns], or [T, columns] if GATHER, 16-bit or float32: rows to sum
    out,  # [E, columns], float: written
    tokens,  # [R], int32: the token of a row; read if GATHER
    pairs,  # [R], int32: the pair of a row; read if WEIGHTED
    weights,  # [T, K], float: routing weights of pairs; read if WEIGHTED
    offsets,  # [E + 1], int32: the first row of each expert
    columns, stride_x_row,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, GATHER: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """out_e = sum of w x over the rows of expert e; w is 1 unless ``WEIGHTED``.

    Grid: (E, ceil(columns / BLOCK)); ROWS are read at once.
    """
    expert = tl.program_id(0)
    begin, end = tl.load(offsets + expert), tl.load(offsets + expert + 1)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([ROWS, BLOCK], tl.float32)
    for k in tl.range(begin, end, ROWS):
        rows = k + tl.arange(0, ROWS)
        row_mask = rows < end
        x_rows = rows
        if GATHER:
            x_rows = tl.load(tokens + rows, mask=row_mask, other=0)
        mask = row_mask[:, None] & (column < columns)[None, :]
        x_pointers = x + x_rows.to(tl.int64)[:, None] * stride_x_row + column[None, :]
        values = tl.load(x_pointers, mask=mask, other=0.0).to(tl.float32)
        if WEIGHTED:
            pair = tl.load(pairs + rows, mask=row_mask, other=0)
            values *= tl.load(weights + pair, mask=row_mask, other=0.0).to(tl.float32)[:, None]
        acc += values
    out_row = out + expert.to(tl.int64) * columns + column
    tl.store(out_row, tl.sum(acc, axis=0).to(out.dtype.element_ty), mask=column < columns)
