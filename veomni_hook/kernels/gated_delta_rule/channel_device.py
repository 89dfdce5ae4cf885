"""Device code within chunks of 64 positions, with a decay for each channel; `triton` launches it.

A product of two positions has another decay in each channel. For each size of 1, 2, 4, ... 32, halves of that
size next to each other are multiplied: the later half is decayed from the end of the earlier one, and the
earlier half to its own end. All factors are products of exp(g), so none is above 1, and nothing is divided.
Rows of one [64, PART] are later halves and earlier ones by turns, so each size takes one product of whole
chunks, of which the blocks beside the diagonal are kept.

Where decays are mild, blocks of 32 positions take the place of the first five sizes: with G from the start of
the block, exp(G) * query and exp(-G) * key are multiplied, and no factor is far from what it is made of.

With G and R the sums of g up to and with a position and behind it, and L the sum of the chunk, results are
those of `local_device.local` but for:

q = scale * exp(G) * query,  k = exp(R) * key,  W = T @ (beta * exp(G) * key),  total = exp(L)
"""

import triton
import triton.language as tl

from veomni_hook.kernels.gated_delta_rule.local_device import EPS, inverse, read_rows

__all__ = ["extend", "in_blocks", "is_later", "local", "mild", "neighbours", "row_scale"]


@triton.jit
def is_later(level):
    """Whether each of 64 positions is in the later one of two halves of 2 ** level: [64, 1]."""
    return ((tl.arange(0, 64) >> level) & 1)[:, None] == 1


@triton.jit
def neighbours(level):
    """Whether two positions are in the two halves of one pair: [64, 64]."""
    block = tl.arange(0, 64) >> level
    return (block ^ 1)[:, None] == block[None, :]


@triton.jit
def extend(before, after, level, PART: tl.constexpr):
    """The decays over a half up to each position and behind each, [64, PART], made those over both halves."""
    block = (tl.arange(0, 64) >> level) ^ 1
    end = ((block + 1) << level) - 1
    other = tl.gather(before, tl.broadcast_to(end[:, None], (64, PART)), axis=0)
    later = is_later(level)
    return before * tl.where(later, other, 1.0), after * tl.where(later, 1.0, other)


@triton.jit
def mild(g, rows_k, PART: tl.constexpr):
    """Sums of ``g`` over blocks of 32 up to and with a position, over the block, and whether to use them.

    exp(40) * 2 ** 40 leaves 2 ** 29 for a gradient's factor and sums in float32; in float16 hardly any decay
    would be mild.
    """
    blocks = tl.reshape(g, (2, 32, PART))
    whole = tl.broadcast_to(tl.sum(blocks, axis=1, keep_dims=True), (2, 32, PART))
    sums, whole = tl.reshape(tl.cumsum(blocks, axis=1), (64, PART)), tl.reshape(whole, (64, PART))
    most = tl.max(tl.max(tl.maximum(tl.abs(sums) / 40, tl.abs(rows_k) * 2.0**-40), axis=1), axis=0)
    return sums, whole, most < 1.0


@triton.jit
def in_blocks():
    """Which pairs are in one block of 32, the first position later than the second: [64, 64]."""
    i = tl.arange(0, 64)
    return (i[:, None] // 32 == i[None, :] // 32) & (i[:, None] > i[None, :])


@triton.jit
def row_scale(
    x, token, head, length, TOKEN: tl.constexpr, HEAD: tl.constexpr, K: tl.constexpr, BK: tl.constexpr
):
    """What l2 normalisation multiplies 64 rows by: [64]."""
    wide = read_rows(x, token, head, length, TOKEN, HEAD, K, BK).to(tl.float32)
    return tl.rsqrt(tl.sum(wide * wide, axis=1) + EPS)


@triton.jit
def _times(x, y):
    return x * y


@triton.jit
def _products(
    rows_q,
    rows_k,
    g,
    weights,
    overlap,
    PRECISION: tl.constexpr,
    PART: tl.constexpr,
    dtype,
):
    """Add the decayed products of q with k, and of k with k below the diagonal.

    Returned beside both: exp of the sums of g up to and with each position, and behind it, [64, PART].
    """
    i = tl.arange(0, 64)
    before, after, first = tl.exp(g), tl.full((64, PART), 1.0, tl.float32), 0
    weights += tl.where(i[:, None] == i[None, :], tl.sum(rows_q * rows_k, axis=1)[:, None], 0.0)
    sums, whole, are_mild = mild(g, rows_k, PART) if dtype != tl.float16 else (g, g, False)
    if are_mild:
        before, after, first = tl.exp(sums), tl.exp(whole - sums), 5
        earlier = tl.trans((rows_k * tl.exp(-sums)).to(dtype))
        product = tl.dot((rows_q * before).to(dtype), earlier, input_precision=PRECISION)
        weights += tl.where(in_blocks(), product, 0.0)
        product = tl.dot((rows_k * before).to(dtype), earlier, input_precision=PRECISION)
        overlap += tl.where(in_blocks(), product, 0.0)
    # Not unrolled: what is kept for each size would fill the registers.
    for level in range(first, 6):
        decay = tl.where(is_later(level), before, after)
        # Factors: predicates for two products would be packed and unpacked.
        block = i >> level
        kept = tl.where(block & 1 == 1, block, -1)[:, None] == (block + 1)[None, :]
        kept = tl.where(kept, 1.0, 0.0)
        earlier = (rows_k * decay).to(dtype)
        product = tl.dot((rows_q * decay).to(dtype), tl.trans(earlier), input_precision=PRECISION)
        weights += product * kept
        product = tl.dot(earlier, tl.trans(earlier), input_precision=PRECISION)
        overlap += product * kept
        before, after = extend(before, after, level, PART)
    return weights, overlap, before, after


@triton.jit
def local(
    query,  # [tokens, HEADS, K], with strides
    key,  # the same shape, with strides
    value,  # [tokens, HEADS, V], with strides
    g,  # [tokens, HEADS, K], with strides
    beta,  # [tokens, HEADS]
    starts,  # [chunks], int32: the first token of a chunk
    ends,  # [chunks], int32: the end of its sample
    q,  # [chunks, HEADS, 64, BK]: a result
    k,  # the same
    total,  # [chunks, HEADS, BK], float32: a result
    solved,  # [chunks, HEADS, 64, 64]: T; a result if SOLVE, else read
    w,  # [chunks, HEADS, 64, BK]: a result
    u,  # [chunks, HEADS, BV, 64]: a result, transposed
    p,  # [chunks, HEADS, 64, 64]: a result if SOLVE
    HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    QT: tl.constexpr,
    QH: tl.constexpr,
    KT: tl.constexpr,
    KH: tl.constexpr,
    VT: tl.constexpr,
    VH: tl.constexpr,
    GT: tl.constexpr,
    GH: tl.constexpr,
    SCALE: tl.constexpr,
    NORMALISE: tl.constexpr,
    SOLVE: tl.constexpr,
    PRECISION: tl.constexpr,
    PART: tl.constexpr,  # of the channels, at a time
):
    """Grid: chunks, heads."""
    chunk = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    place = chunk * HEADS + head
    dtype = w.dtype.element_ty
    i, columns, states = tl.arange(0, 64), tl.arange(0, PART), tl.arange(0, BV)
    token = tl.load(starts + chunk).to(tl.int64)
    length = tl.load(ends + chunk) - token
    write = tl.load(beta + token * HEADS + head + i * HEADS, mask=i < length, other=0.0).to(tl.float32)
    square = i[:, None] * 64 + i[None, :]
    tile = i[:, None] * BK + columns[None, :]

    scale_q, scale_k = tl.full((64,), SCALE, tl.float32), tl.full((64,), 1.0, tl.float32)
    if NORMALISE:
        scale_q *= row_scale(query, token, head, length, QT, QH, K, BK)
        scale_k *= row_scale(key, token, head, length, KT, KH, K, BK)
    weights = tl.zeros((64, 64), tl.float32)
    overlap = tl.zeros((64, 64), tl.float32)
    for part in range(0, BK, PART):
        rows_q = read_rows(query + part, token, head, length, QT, QH, K - part, PART)
        rows_q = rows_q.to(tl.float32) * scale_q[:, None]
        rows_k = read_rows(key + part, token, head, length, KT, KH, K - part, PART)
        rows_k = rows_k.to(tl.float32) * scale_k[:, None]
        decays = read_rows(g + part, token, head, length, GT, GH, K - part, PART).to(tl.float32)
        if SOLVE:
            weights, overlap, before, after = _products(
                rows_q, rows_k, decays, weights, overlap, PRECISION, PART, dtype
            )
        else:
            rest = tl.minimum(length, 64) - 1
            next_decays = read_rows(g + GT + part, token, head, rest, GT, GH, K - part, PART).to(tl.float32)
            before = tl.associative_scan(tl.exp(decays), 0, _times)
            after = tl.associative_scan(tl.exp(next_decays), 0, _times, reverse=True)
        rows = place * 64 * BK + part
        tl.store(q + rows + tile, (rows_q * before).to(dtype))
        tl.store(k + rows + tile, (rows_k * after).to(dtype))
        tl.store(w + rows + tile, (rows_k * before * write[:, None]).to(dtype))
        at = total + place * BK + part + columns[None, :] + tl.zeros((64, 1), tl.int32)
        tl.store(at, before, mask=i[:, None] == 63)

    if SOLVE:
        tl.store(p + place * 64 * 64 + square, weights.to(dtype))
        t = inverse(overlap * write[:, None], PRECISION).to(dtype)
        tl.store(solved + place * 64 * 64 + square, t)
    else:
        t = tl.load(solved + place * 64 * 64 + square)
    rows_v = read_rows(value, token, head, length, VT, VH, V, BV)
    scaled = (rows_v.to(tl.float32) * write[:, None]).to(dtype)
    new = tl.dot(tl.trans(scaled), tl.trans(t), input_precision=PRECISION)
    tl.store(u + place * BV * 64 + states[:, None] * 64 + i[None, :], new.to(dtype))
    # What the parts have left there, multiplied in place: each waits until all have read.
    tl.debug_barrier()
    tile = i[:, None] * BK + tl.arange(0, BK)[None, :]
    read = tl.dot(t, tl.load(w + place * 64 * BK + tile), input_precision=PRECISION).to(dtype)
    tl.debug_barrier()
    tl.store(w + place * 64 * BK + tile, read)
