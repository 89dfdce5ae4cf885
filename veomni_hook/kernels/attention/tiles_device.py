"""Device code of attention with sinks under a dense mask; `veomni_hook.kernels.attention.tiles` launches it.

For a query s and a head h, over the keys t of tiles in which the mask hides not all from a block of queries:

    score_t = scale * query . key_t + mask[s, t],   lse = log(exp(sink) + sum_t exp(score_t))
    p_t = exp(score_t - lse),   out = sum_t p_t value_t,   delta = dout . out
    dscore_t = p_t * (dout . value_t - delta),   dquery = scale * sum_t dscore_t key_t
    dkey_t = scale * sum_s,h dscore_t query,     dvalue_t = sum_s,h p_t dout

Rows of a tile are QUERIES queries of HEADS heads that share their keys, so keys are read once for all of
these. Operands of products have the dtype of the query; scores, softmax and sums are in float32.

If SHARED, values are the keys, as in DeepSeek-V4. The backward then has rows of queries and of dout in one
tile: one product with the keys gives the scores and the slopes dout . key, and what keys receive as keys and
as values is one sum, which takes the registers of one.
"""

import triton
import triton.language as tl

__all__ = ["backward_keys", "backward_query", "forward"]

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _tile(x, rows, columns, kept, WIDTH: tl.constexpr):
    """Rows of a matrix, [rows, columns]; 0 where there are none."""
    return tl.load(
        x + rows[:, None] + columns[None, :], mask=kept[:, None] & (columns < WIDTH)[None, :], other=0.0
    )


@triton.jit
def _added_of(mask, s, t, queries, keys, mask_row, mask_column):
    """What the mask adds for queries s and keys t, in units of log 2; -inf where there are none."""
    at = mask + s.to(tl.int64) * mask_row + t.to(tl.int64) * mask_column
    added = tl.load(at, mask=(s < queries) & (t < keys), other=float("-inf")).to(tl.float32)
    # The smallest number of float32 becomes -inf here. Nothing is NaN by that: the sink of a row is finite.
    return added * LOG2E


@triton.jit
def _scores_of(
    q, k, mask, s, t, queries, keys, mask_row, mask_column, scale,
    QUERIES: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Scores [QUERIES * HEADS, keys] in units of log 2."""
    added = _added_of(mask, s[:, None], t[None, :], queries, keys, mask_row, mask_column)
    added = tl.broadcast_to(added[:, None, :], (QUERIES, HEADS, t.shape[0]))
    products = tl.dot(q, tl.trans(k), input_precision="ieee")
    return products * (scale * LOG2E) + added.reshape(QUERIES * HEADS, t.shape[0])


@triton.jit
def _rows_of_both(
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
def forward(
    query,  # [batch, KV * GROUP, queries, WIDTH], strided; columns are contiguous
    key,  # [batch, KV, keys, WIDTH], the same
    value,  # [batch, KV, keys, VALUE_WIDTH], the same; not read if SHARED
    mask,  # [1 or batch, queries, keys], strided
    sinks,  # [KV * GROUP]
    tiles,  # [1 or batch, blocks of queries, tiles of keys], int32: those to visit come first
    counts,  # [1 or batch, blocks of queries], int32: how many they are
    out,  # [batch, queries, KV * GROUP, VALUE_WIDTH]: a result
    lse,  # [batch, KV * GROUP, queries], float32: a result
    queries, keys,
    query_batch, query_head, query_row, key_batch, key_head, key_row, value_batch, value_head, value_row,
    mask_batch, mask_row, mask_column, tiles_batch, counts_batch,
    scale,
    KV: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, VALUE_COLUMNS: tl.constexpr,
    QUERIES: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
    SHARED: tl.constexpr,
):  # fmt: skip
    """Grid: blocks of queries, chunks of a group's heads, batch * KV."""
    block, kv = tl.program_id(0), tl.program_id(2) % KV
    sample = (tl.program_id(2) // KV).to(tl.int64)
    row = tl.arange(0, QUERIES * HEADS)
    s, h = block * QUERIES + row // HEADS, tl.program_id(1) * HEADS + row % HEADS
    kept, head = (s < queries) & (h < GROUP), kv * GROUP + h
    column, value_column = tl.arange(0, COLUMNS), tl.arange(0, VALUE_COLUMNS)
    at = sample * query_batch + head.to(tl.int64) * query_head + s.to(tl.int64) * query_row
    q = _tile(query, at, column, kept, WIDTH)
    sink = tl.load(sinks + head, mask=kept, other=0.0).to(tl.float32) * LOG2E
    own_s = block * QUERIES + tl.arange(0, QUERIES)
    own_mask = mask + sample * mask_batch
    own_tiles = tiles + sample * tiles_batch + block.to(tl.int64) * tl.cdiv(keys, KEYS)
    largest, total = sink, tl.full([QUERIES * HEADS], 1.0, tl.float32)
    result = tl.zeros([QUERIES * HEADS, VALUE_COLUMNS], tl.float32)
    for i in tl.range(0, tl.load(counts + sample * counts_batch + block), num_stages=STAGES):
        t = tl.load(own_tiles + i) * KEYS + tl.arange(0, KEYS)
        there, far = t < keys, t.to(tl.int64)
        k = _tile(key, sample * key_batch + kv * key_head + far * key_row, column, there, WIDTH)
        scores = _scores_of(
            q, k, own_mask, own_s, t, queries, keys, mask_row, mask_column, scale, QUERIES, HEADS
        )
        larger = tl.maximum(largest, tl.max(scores, 1))
        p, shrunk = tl.exp2(scores - larger[:, None]), tl.exp2(largest - larger)
        largest, total = larger, total * shrunk + tl.sum(p, 1)
        if SHARED:
            v = k
        else:
            own_value = sample * value_batch + kv * value_head + far * value_row
            v = _tile(value, own_value, value_column, there, VALUE_WIDTH)
        result = tl.dot(p.to(v.dtype), v, result * shrunk[:, None], input_precision="ieee")
    result = result / total[:, None]
    at = ((sample * queries + s) * (KV * GROUP) + head) * VALUE_WIDTH
    columns = kept[:, None] & (value_column < VALUE_WIDTH)[None, :]
    tl.store(out + at[:, None] + value_column[None, :], result.to(out.dtype.element_ty), mask=columns)
    tl.store(
        lse + (sample * (KV * GROUP) + head) * queries + s, (largest + tl.log2(total)) / LOG2E, mask=kept
    )


@triton.jit(do_not_specialize=["queries", "keys"])
def backward_query(
    query, key, value, mask,  # as in `forward`
    out, dout,  # [batch, queries, KV * GROUP, VALUE_WIDTH]
    lse,  # [batch, KV * GROUP, queries]
    tiles, counts,  # as in `forward`
    dquery,  # [batch, KV * GROUP, queries, WIDTH]: a result
    delta,  # [batch, KV * GROUP, queries], float32: a result
    queries, keys,
    query_batch, query_head, query_row, key_batch, key_head, key_row, value_batch, value_head, value_row,
    mask_batch, mask_row, mask_column, tiles_batch, counts_batch,
    scale,
    KV: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, VALUE_COLUMNS: tl.constexpr,
    QUERIES: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
    SHARED: tl.constexpr,
):  # fmt: skip
    """Grid: as `forward`."""
    ROWS: tl.constexpr = QUERIES * HEADS
    block, kv = tl.program_id(0), tl.program_id(2) % KV
    sample = (tl.program_id(2) // KV).to(tl.int64)
    row = tl.arange(0, ROWS)
    s, h = block * QUERIES + row // HEADS, tl.program_id(1) * HEADS + row % HEADS
    kept, head = (s < queries) & (h < GROUP), kv * GROUP + h
    column, value_column = tl.arange(0, COLUMNS), tl.arange(0, VALUE_COLUMNS)
    if not SHARED:
        at = sample * query_batch + head.to(tl.int64) * query_head + s.to(tl.int64) * query_row
        q = _tile(query, at, column, kept, WIDTH)
    at = ((sample * queries + s) * (KV * GROUP) + head) * VALUE_WIDTH
    do = _tile(dout, at, value_column, kept, VALUE_WIDTH)
    o = _tile(out, at, value_column, kept, VALUE_WIDTH)
    own_delta = tl.sum(do.to(tl.float32) * o.to(tl.float32), 1)
    at = (sample * (KV * GROUP) + head) * queries + s
    tl.store(delta + at, own_delta, mask=kept)
    own_lse = tl.load(lse + at, mask=kept, other=0.0) * LOG2E
    if SHARED:
        # Rows of dout follow those of the queries: with 64 of each, no two groups of warps share a product.
        pair = tl.arange(0, 2 * ROWS)
        q = _rows_of_both(
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
        there, far = t < keys, t.to(tl.int64)
        k = _tile(key, sample * key_batch + kv * key_head + far * key_row, column, there, WIDTH)
        added = _added_of(own_mask, own_s[:, None], t[None, :], queries, keys, mask_row, mask_column)
        added = tl.broadcast_to(added[:, None, :], (QUERIES, HEADS, KEYS)).reshape(ROWS, KEYS)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if SHARED:
            scores, slopes = scores.reshape(2, ROWS, KEYS).permute(1, 2, 0).split()
        p = tl.exp2(scores * (scale * LOG2E) + added - own_lse[:, None])
        if not SHARED:
            own_value = sample * value_batch + kv * value_head + far * value_row
            v = _tile(value, own_value, value_column, there, VALUE_WIDTH)
            slopes = tl.dot(do, tl.trans(v), input_precision="ieee")
        slopes = p * (slopes - own_delta[:, None])
        result = tl.dot(slopes.to(k.dtype), k, result, input_precision="ieee")
    at = ((sample * (KV * GROUP) + head) * queries + s) * WIDTH
    columns = kept[:, None] & (column < WIDTH)[None, :]
    tl.store(
        dquery + at[:, None] + column[None, :], (result * scale).to(dquery.dtype.element_ty), mask=columns
    )


@triton.jit(do_not_specialize=["queries", "keys"])
def backward_keys(  # noqa: PLR0915 - three forms of one walk
    query, key, value, mask,  # as in `forward`
    dout,  # [batch, queries, KV * GROUP, VALUE_WIDTH]
    lse, delta,  # [batch, KV * GROUP, queries]
    blocks,  # [1 or batch, tiles of keys, blocks of queries], int32: those that see the tile come first
    counts,  # [1 or batch, tiles of keys], int32: how many they are
    order,  # [1 or batch, tiles of keys], int32: all tiles, those that most blocks see first
    parts,  # [PARTS * chunks, batch, KV, keys, WIDTH or VALUE_WIDTH], float32: parts of the sums
    queries, keys, batch,
    query_batch, query_head, query_row, key_batch, key_head, key_row, value_batch, value_head, value_row,
    mask_batch, mask_row, mask_column, blocks_batch, counts_batch,
    scale,
    KV: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, VALUE_COLUMNS: tl.constexpr,
    QUERIES: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
    SHARED: tl.constexpr, PARTS: tl.constexpr, OF_VALUES: tl.constexpr,
):  # fmt: skip
    """Parts of dvalue if OF_VALUES, of dkey + dvalue if SHARED, else of dkey.

    Grid: PARTS * chunks of heads, tiles of keys, batch * KV. A program adds up every PARTS-th block of
    queries, always in the same order. Two sums in one program would share the scores, but for wide heads
    their registers do not suffice: on Hopper ptxas then spills 6 KB.
    """
    ROWS: tl.constexpr = QUERIES * HEADS
    SUM_WIDTH: tl.constexpr = VALUE_WIDTH if OF_VALUES else WIDTH
    SUM_COLUMNS: tl.constexpr = VALUE_COLUMNS if OF_VALUES else COLUMNS
    part, chunk = tl.program_id(0) % PARTS, tl.program_id(0) // PARTS
    kv, sample = tl.program_id(2) % KV, (tl.program_id(2) // KV).to(tl.int64)
    tile_of_keys = tl.load(order + sample * counts_batch + tl.program_id(1))
    row, pair = tl.arange(0, ROWS), tl.arange(0, 2 * ROWS)
    h = chunk * HEADS + row % HEADS
    head = kv * GROUP + h
    column, value_column = tl.arange(0, COLUMNS), tl.arange(0, VALUE_COLUMNS)
    t = tile_of_keys * KEYS + tl.arange(0, KEYS)
    there, far = t < keys, t.to(tl.int64)
    k = _tile(key, sample * key_batch + kv * key_head + far * key_row, column, there, WIDTH)
    if not (SHARED or OF_VALUES):
        at_value = sample * value_batch + kv * value_head + far * value_row
        v = _tile(value, at_value, value_column, there, VALUE_WIDTH)
    own_mask = mask + sample * mask_batch
    own_blocks = blocks + sample * blocks_batch + tile_of_keys.to(tl.int64) * tl.cdiv(queries, QUERIES)
    result = tl.zeros([KEYS, SUM_COLUMNS], tl.float32)
    for i in tl.range(part, tl.load(counts + sample * counts_batch + tile_of_keys), PARTS, num_stages=STAGES):
        begin = tl.load(own_blocks + i) * QUERIES
        if SHARED:
            # Rows of dout and of queries take turns: a thread then holds the slope of a score that it holds.
            both = _rows_of_both(
                query, dout, pair % 2 == 1, sample, begin + pair // 2 // HEADS,
                chunk * HEADS + pair // 2 % HEADS, kv, queries, query_batch, query_head, query_row,
                KV, GROUP, WIDTH, COLUMNS,
            )  # fmt: skip
        s = begin + row // HEADS
        kept = (s < queries) & (h < GROUP)
        if not SHARED:
            at = sample * query_batch + head.to(tl.int64) * query_head + s.to(tl.int64) * query_row
            q = _tile(query, at, column, kept, WIDTH)
            at = ((sample * queries + s) * (KV * GROUP) + head) * VALUE_WIDTH
            do = _tile(dout, at, value_column, kept, VALUE_WIDTH)
        at = (sample * (KV * GROUP) + head) * queries + s
        own_lse = tl.load(lse + at, mask=kept, other=float("inf")) * LOG2E
        own_s = begin + tl.arange(0, QUERIES)
        if SHARED:
            own_delta = tl.load(delta + at, mask=kept, other=0.0)
            added = _added_of(own_mask, own_s[None, :], t[:, None], queries, keys, mask_row, mask_column)
            added = tl.broadcast_to(added[:, :, None], (KEYS, QUERIES, HEADS)).reshape(KEYS, ROWS)
            products = tl.dot(k, tl.trans(both), input_precision="ieee")
            scores, slopes = products.reshape(KEYS, ROWS, 2).split()
            p = tl.exp2(scores * (scale * LOG2E) + added - own_lse[None, :])
            slopes = p * (slopes - own_delta[None, :]) * scale
            both_slopes = tl.join(slopes, p).reshape(KEYS, 2 * ROWS)
            result = tl.dot(both_slopes.to(k.dtype), both, result, input_precision="ieee")
        else:
            scores = _scores_of(
                q, k, own_mask, own_s, t, queries, keys, mask_row, mask_column, scale, QUERIES, HEADS
            )
            p = tl.exp2(scores - own_lse[:, None])
            if OF_VALUES:
                result = tl.dot(tl.trans(p.to(do.dtype)), do, result, input_precision="ieee")
            else:
                own_delta = tl.load(delta + at, mask=kept, other=0.0)
                slopes = p * (tl.dot(do, tl.trans(v), input_precision="ieee") - own_delta[:, None]) * scale
                result = tl.dot(tl.trans(slopes.to(q.dtype)), q, result, input_precision="ieee")
    at = ((tl.program_id(0).to(tl.int64) * batch + sample) * KV + kv) * keys + far
    sums = value_column if OF_VALUES else column
    columns = there[:, None] & (sums < SUM_WIDTH)[None, :]
    tl.store(parts + at[:, None] * SUM_WIDTH + sums[None, :], result, mask=columns)
