"""Device code that sorts pairs by expert and combines rows' results per token.

`veomni_hook.kernels.moe_experts.triton_routing` and `.triton_products` launch it; `.device` defines rows and
tiles.
"""

import triton
import triton.language as tl

__all__ = ["column_sums", "combine", "routing_gradient", "routing_keys", "routing_tables"]


@triton.jit(do_not_specialize=["total"])
def routing_keys(ids, keys, total, experts, BLOCK: tl.constexpr):
    """Sort keys of pairs: their expert, or the number of experts for ids without an expert."""
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = pair < total
    expert = tl.load(ids + pair, mask=there, other=0)
    expert = tl.where((expert >= 0) & (expert < experts), expert, experts)
    tl.store(keys + pair, expert.to(keys.dtype.element_ty), mask=there)


@triton.jit
def _rows_below(keys, expert, total, steps):
    """The number of sorted keys below each of ``expert``."""
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
    """Fill a block of tokens, pairs and inverse positions of rows, and a block of tiles.

    Each program computes all offsets itself, which saves a launch.
    """
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = rows < total
    pair = tl.load(order + rows, mask=there, other=0).to(tl.int32)
    tl.store(pairs + rows, pair, mask=there)
    tl.store(tokens + rows, pair // top_k, mask=there)
    tl.store(rows_of + pair, rows, mask=there)
    expert = tl.arange(0, EXPERTS)
    exists = expert < experts
    # Both searches at once: one after the other, they would wait for memory twice as often.
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
    """One block of columns of one token: the sum over its places, in order.

    Places without an expert add nothing.
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
    """The gradient of a block of routing weights: the rows' partial sums, plus the scaled bias's term."""
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
