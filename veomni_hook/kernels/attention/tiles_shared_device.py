"""Device code of the backward of `tiles_device` where keys are the values, as in DeepSeek-V4.

A tile `both` holds rows of queries and of dout. One product with the keys then gives the scores and the
slopes dout . key, and what keys receive as keys and as values is one sum: it takes the registers of one.
"""

import triton
import triton.language as tl

from veomni_hook.kernels.attention.tiles_device import LOG2E, added_of, tile

__all__ = ["backward_keys", "backward_query"]


@triton.jit
def rows_of_both(
    query, dout, is_dout, sample, s, h, kv, queries,
    query_batch, query_head, query_row,
    KV: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Rows s, h of dout where `is_dout`, else of the queries; 0 where there are none."""
    head = (kv * GROUP + h).to(tl.int64)
    of_query = query + sample * query_batch + head * query_head + s.to(tl.int64) * query_row
    of_dout = dout + ((sample * queries + s) * (KV * GROUP) + head) * WIDTH
    rows = tl.where(is_dout, of_dout, of_query)
    column = tl.arange(0, COLUMNS)
    kept = ((s < queries) & (h < GROUP))[:, None] & (column < WIDTH)[None, :]
    return tl.load(rows[:, None] + column[None, :], mask=kept, other=0.0)


@triton.jit(do_not_specialize=["queries", "keys"])
def backward_query(
    query, key, mask, out, dout, lse, tiles, counts, dquery, delta,  # as in `tiles_device.backward_query`
    queries, keys,
    query_batch, query_head, query_row, key_batch, key_head, key_row,
    mask_batch, mask_row, mask_column, tiles_batch, counts_batch,
    scale,
    KV: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    QUERIES: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid: blocks of queries, chunks of a group's heads, batch * KV.

    Rows of dout follow those of the queries: with 64 of each, no two groups of warps share a product.
    """
    ROWS: tl.constexpr = QUERIES * HEADS
    block, kv = tl.program_id(0), tl.program_id(2) % KV
    sample = (tl.program_id(2) // KV).to(tl.int64)
    row, pair, column = tl.arange(0, ROWS), tl.arange(0, 2 * ROWS), tl.arange(0, COLUMNS)
    s, h = block * QUERIES + row // HEADS, tl.program_id(1) * HEADS + row % HEADS
    kept, head = (s < queries) & (h < GROUP), kv * GROUP + h
    at = ((sample * queries + s) * (KV * GROUP) + head) * WIDTH
    do, o = tile(dout, at, column, kept, WIDTH), tile(out, at, column, kept, WIDTH)
    own_delta = tl.sum(do.to(tl.float32) * o.to(tl.float32), 1)
    at = (sample * (KV * GROUP) + head) * queries + s
    tl.store(delta + at, own_delta, mask=kept)
    own_lse = tl.load(lse + at, mask=kept, other=0.0) * LOG2E
    both = rows_of_both(
        query, dout, pair >= ROWS, sample, block * QUERIES + pair % ROWS // HEADS,
        tl.program_id(1) * HEADS + pair % HEADS, kv, queries, query_batch, query_head, query_row,
        KV, GROUP, WIDTH, COLUMNS,
    )  # fmt: skip
    own_s = block * QUERIES + tl.arange(0, QUERIES)
    own_mask = mask + sample * mask_batch
    own_tiles = tiles + sample * tiles_batch + block.to(tl.int64) * tl.cdiv(keys, KEYS)
    result = tl.zeros([ROWS, COLUMNS], tl.float32)
    for i in tl.range(0, tl.load(counts + sample * counts_batch + block), num_stages=STAGES):
        t = tl.load(own_tiles + i) * KEYS + tl.arange(0, KEYS)
        far = sample * key_batch + kv * key_head + t.to(tl.int64) * key_row
        k = tile(key, far, column, t < keys, WIDTH)
        added = added_of(own_mask, own_s[:, None], t[None, :], queries, keys, mask_row, mask_column)
        added = tl.broadcast_to(added[:, None, :], (QUERIES, HEADS, KEYS)).reshape(ROWS, KEYS)
        products = tl.dot(both, tl.trans(k), input_precision="ieee")
        scores, slopes = products.reshape(2, ROWS, KEYS).permute(1, 2, 0).split()
        p = tl.exp2(scores * (scale * LOG2E) + added - own_lse[:, None])
        slopes = p * (slopes - own_delta[:, None])
        result = tl.dot(slopes.to(k.dtype), k, result, input_precision="ieee")
    at = ((sample * (KV * GROUP) + head) * queries + s) * WIDTH
    columns = kept[:, None] & (column < WIDTH)[None, :]
    tl.store(
        dquery + at[:, None] + column[None, :], (result * scale).to(dquery.dtype.element_ty), mask=columns
    )


@triton.jit(do_not_specialize=["queries", "keys"])
def backward_keys(
    query, key, mask, dout, lse, delta, blocks, counts, order, parts,  # as in `tiles_device.backward_keys`
    queries, keys, batch,
    query_batch, query_head, query_row, key_batch, key_head, key_row,
    mask_batch, mask_row, mask_column, blocks_batch, counts_batch,
    scale,
    KV: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    QUERIES: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Parts of dkey + dvalue. Grid: as `tiles_device.backward_keys`.

    Rows of dout and of queries take turns: a thread then holds the slope of a score that it holds.
    """
    ROWS: tl.constexpr = QUERIES * HEADS
    part, chunk = tl.program_id(0) % PARTS, tl.program_id(0) // PARTS
    kv, sample = tl.program_id(2) % KV, (tl.program_id(2) // KV).to(tl.int64)
    tile_of_keys = tl.load(order + sample * counts_batch + tl.program_id(1))
    row, pair, column = tl.arange(0, ROWS), tl.arange(0, 2 * ROWS), tl.arange(0, COLUMNS)
    h = chunk * HEADS + row % HEADS
    t = tile_of_keys * KEYS + tl.arange(0, KEYS)
    there, far = t < keys, t.to(tl.int64)
    k = tile(key, sample * key_batch + kv * key_head + far * key_row, column, there, WIDTH)
    own_mask = mask + sample * mask_batch
    own_blocks = blocks + sample * blocks_batch + tile_of_keys.to(tl.int64) * tl.cdiv(queries, QUERIES)
    result = tl.zeros([KEYS, COLUMNS], tl.float32)
    for i in tl.range(part, tl.load(counts + sample * counts_batch + tile_of_keys), PARTS, num_stages=STAGES):
        begin = tl.load(own_blocks + i) * QUERIES
        both = rows_of_both(
            query, dout, pair % 2 == 1, sample, begin + pair // 2 // HEADS,
            chunk * HEADS + pair // 2 % HEADS, kv, queries, query_batch, query_head, query_row,
            KV, GROUP, WIDTH, COLUMNS,
        )  # fmt: skip
        s = begin + row // HEADS
        kept = (s < queries) & (h < GROUP)
        at = (sample * (KV * GROUP) + kv * GROUP + h) * queries + s
        own_lse = tl.load(lse + at, mask=kept, other=float("inf")) * LOG2E
        own_delta = tl.load(delta + at, mask=kept, other=0.0)
        own_s = begin + tl.arange(0, QUERIES)
        added = added_of(own_mask, own_s[None, :], t[:, None], queries, keys, mask_row, mask_column)
        added = tl.broadcast_to(added[:, :, None], (KEYS, QUERIES, HEADS)).reshape(KEYS, ROWS)
        products = tl.dot(k, tl.trans(both), input_precision="ieee")
        scores, slopes = products.reshape(KEYS, ROWS, 2).split()
        p = tl.exp2(scores * (scale * LOG2E) + added - own_lse[None, :])
        slopes = p * (slopes - own_delta[None, :]) * scale
        both_slopes = tl.join(slopes, p).reshape(KEYS, 2 * ROWS)
        result = tl.dot(both_slopes.to(k.dtype), both, result, input_precision="ieee")
    at = ((tl.program_id(0).to(tl.int64) * batch + sample) * KV + kv) * keys + far
    columns = there[:, None] & (column < WIDTH)[None, :]
    tl.store(parts + at[:, None] * WIDTH + column[None, :], result, mask=columns)
