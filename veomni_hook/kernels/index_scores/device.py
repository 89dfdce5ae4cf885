"""Device code of index scores; `veomni_hook.kernels.index_scores.triton` launches it.

score[s, t] = sum_h (scale * w[s, h]) * relu(query[s, h] . key[t]); scale > 0, so it can be taken out of relu.
"""

import triton
import triton.language as tl

__all__ = ["forward"]


@triton.jit(do_not_specialize=["queries", "keys", "query_blocks"])
def forward(
    query,  # [batch, queries, HEADS, WIDTH], strided; columns are contiguous
    key,  # [batch, keys, WIDTH], strided; columns are contiguous
    weights,  # [batch, queries, HEADS], strided
    scores,  # [batch, queries, keys], float32: the result
    queries, keys, query_blocks,
    query_batch, query_row, query_head,
    key_batch, key_row,
    weights_batch, weights_row, weights_head,
    scale,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,  # a power of two that holds WIDTH
    RELU: tl.constexpr,
    QUERIES: tl.constexpr,  # of a tile
    KEYS: tl.constexpr,  # of a tile
):  # fmt: skip
    """A tile of scores. Grid: blocks of keys, the fastest, times blocks of queries, times batch."""
    key_blocks = tl.cdiv(keys, KEYS)
    program = tl.program_id(0)
    t = (program % key_blocks) * KEYS + tl.arange(0, KEYS)
    rest = program // key_blocks
    s = (rest % query_blocks) * QUERIES + tl.arange(0, QUERIES)
    sample = (rest // query_blocks).to(tl.int64)
    column = tl.arange(0, BLOCK)
    some_queries, some_keys, wide = s < queries, t < keys, column < WIDTH
    s, t = s.to(tl.int64), t.to(tl.int64)
    key_at = key + sample * key_batch + t[None, :] * key_row + column[:, None]
    k = tl.load(key_at, mask=some_keys[None, :] & wide[:, None], other=0.0)
    query_at = query + sample * query_batch + s[:, None] * query_row + column[None, :]
    weights_at = weights + sample * weights_batch + s * weights_row
    total = tl.zeros([QUERIES, KEYS], tl.float32)
    for head in tl.range(0, HEADS):
        q = tl.load(query_at + head * query_head, mask=some_queries[:, None] & wide[None, :], other=0.0)
        w = tl.load(weights_at + head * weights_head, mask=some_queries, other=0.0) * scale
        product = tl.dot(q, k, input_precision="ieee")
        if RELU:
            product = tl.maximum(product, 0.0, propagate_nan=tl.PropagateNan.ALL)
        total += product * w[:, None]
    at = scores + (sample * queries + s[:, None]) * keys + t[None, :]
    tl.store(at, total, mask=some_queries[:, None] & some_keys[None, :])
