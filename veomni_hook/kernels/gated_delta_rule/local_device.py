"""Device code of the gated delta rule within chunks of 64 positions; `triton` launches it.

For each chunk and head, with G the cumulative sum of g in the chunk, and D[i, j] = exp(G[i] - G[j]):

A = beta[i] * D[i, j] * (k[i] . k[j])  for i > j, else 0
T = (I + A)^-1
W = T @ (beta * exp(G) * k)            what is subtracted of values for a state
U = T @ (beta * v)                     what a state of zeros would be given
P = scale * D[i, j] * (q[i] . k[j])    for i >= j, else 0: how much i reads of what j writes

Results are of whole chunks: positions behind the end of a sample have zeros, so a scan needs no masks.
"""

import triton
import triton.language as tl

__all__ = ["EPS", "inverse", "local", "read_rows", "write_rows"]

EPS = tl.constexpr(1e-6)


@triton.jit
def inverse(a, PRECISION: tl.constexpr):
    """(I + a)^-1 for a strictly lower triangular [64, 64], in float32.

    Blocks of 16 on the diagonal are solved row by row, which no cancellation harms. With their inverse d and
    the rest l of a, n = d @ l is nilpotent in blocks, so (I + n)^-1 @ d is a sum of four terms.
    """
    block = tl.arange(0, 4)
    row = tl.arange(0, 16)
    blocks = tl.reshape(a, (4, 16, 4, 16))
    same = block[:, None, None, None] == block[None, None, :, None]
    t = -tl.sum(tl.where(same, blocks, 0.0), axis=2)  # [4, 16, 16]
    for i in range(2, 16):
        this = row[None, :, None] == i
        values = tl.sum(tl.where(this, t, 0.0), axis=1)  # [4, 16]
        values += tl.sum(values[:, :, None] * t, axis=1)
        t = tl.where(this, values[:, None, :], t)
    t += tl.where(row[None, :, None] == row[None, None, :], 1.0, 0.0)
    wide = tl.where(same, t[:, :, None, :], 0.0)
    d = tl.reshape(wide, (64, 64))
    i = tl.arange(0, 64)
    left = tl.where((i[:, None] // 16) > (i[None, :] // 16), a, 0.0)
    n = tl.dot(d, left, input_precision=PRECISION)
    x = d
    for _ in range(3):
        x = d - tl.dot(n, x, input_precision=PRECISION)
    return x


@triton.jit
def read_rows(x, token, head, length, TOKEN: tl.constexpr, HEAD: tl.constexpr, WIDTH, BLOCK: tl.constexpr):
    """64 rows of [tokens, heads, WIDTH], with strides, from a token on; zeros behind `length`."""
    i, column = tl.arange(0, 64), tl.arange(0, BLOCK)
    inside = (i[:, None] < length) & (column[None, :] < WIDTH)
    return tl.load(
        x + token * TOKEN + head * HEAD + i[:, None] * TOKEN + column[None, :], mask=inside, other=0.0
    )


@triton.jit
def write_rows(
    x, values, token, head, length, TOKEN: tl.constexpr, HEAD: tl.constexpr, WIDTH, BLOCK: tl.constexpr
):
    """Write [64, BLOCK] to 64 rows of [tokens, heads, WIDTH]; nothing behind `length`."""
    i, column = tl.arange(0, 64), tl.arange(0, BLOCK)
    inside = (i[:, None] < length) & (column[None, :] < WIDTH)
    at = x + token * TOKEN + head * HEAD + i[:, None] * TOKEN + column[None, :]
    tl.store(at, values.to(x.dtype.element_ty), mask=inside)


@triton.jit
def _normalised(x):
    wide = x.to(tl.float32)
    return (wide * tl.rsqrt(tl.sum(wide * wide, axis=1) + EPS)[:, None]).to(x.dtype)


@triton.jit
def local(
    query,  # [tokens, HEADS // GROUPS, K], with strides
    key,  # the same shape, with strides
    value,  # [tokens, HEADS, V], with strides
    g,  # [tokens, HEADS]
    beta,  # [tokens, HEADS]
    starts,  # [chunks], int32: the first token of a chunk
    ends,  # [chunks], int32: the end of its sample
    q,  # [chunks, HEADS // GROUPS, 64, BK]: a result, normalised if NORMALISE
    k,  # the same
    total,  # [chunks, HEADS, 64], float32: the cumulative sum of g: a result
    solved,  # [chunks, HEADS, 64, 64]: T; a result if SOLVE, else read
    w,  # [chunks, HEADS, 64, BK]: a result
    u,  # [chunks, HEADS, BV, 64]: a result, transposed
    p,  # [chunks, HEADS, 64, 64]: a result
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
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
    SCALE: tl.constexpr,
    NORMALISE: tl.constexpr,
    SOLVE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid: chunks, key heads."""
    chunk = tl.program_id(0).to(tl.int64)
    key_head = tl.program_id(1)
    dtype = w.dtype.element_ty
    i, columns, states = tl.arange(0, 64), tl.arange(0, BK), tl.arange(0, BV)
    token = tl.load(starts + chunk).to(tl.int64)
    length = tl.load(ends + chunk) - token
    exists = i < length
    tile = i[:, None] * BK + columns[None, :]
    square = i[:, None] * 64 + i[None, :]

    rows_q = read_rows(query, token, key_head, length, QT, QH, K, BK)
    rows_k = read_rows(key, token, key_head, length, KT, KH, K, BK)
    if NORMALISE:
        rows_q, rows_k = _normalised(rows_q), _normalised(rows_k)
    shared = (chunk * (HEADS // GROUPS) + key_head) * 64 * BK
    tl.store(q + shared + tile, rows_q)
    tl.store(k + shared + tile, rows_k)
    if SOLVE:
        overlap = tl.dot(rows_k, tl.trans(rows_k), input_precision=PRECISION)
    scores = tl.dot(rows_q, tl.trans(rows_k), input_precision=PRECISION) * SCALE
    lower = i[:, None] >= i[None, :]

    for group in range(GROUPS):
        head = key_head * GROUPS + group
        place = chunk * HEADS + head
        at = token * HEADS + head
        decay = tl.load(g + at + i * HEADS, mask=exists, other=0.0).to(tl.float32)
        write = tl.load(beta + at + i * HEADS, mask=exists, other=0.0).to(tl.float32)
        G = tl.cumsum(decay, axis=0)
        tl.store(total + place * 64 + i, G)
        between = tl.exp(tl.where(lower, G[:, None] - G[None, :], float("-inf")))
        tl.store(p + place * 64 * 64 + square, (scores * between).to(dtype))
        if SOLVE:
            a = tl.where(i[:, None] > i[None, :], overlap * between * write[:, None], 0.0)
            t = inverse(a, PRECISION).to(dtype)
            tl.store(solved + place * 64 * 64 + square, t)
        else:
            t = tl.load(solved + place * 64 * 64 + square)
        rows_v = read_rows(value, token, head, length, VT, VH, V, BV)
        scaled = (rows_v.to(tl.float32) * write[:, None]).to(dtype)
        new = tl.dot(tl.trans(scaled), tl.trans(t), input_precision=PRECISION)
        tl.store(u + place * BV * 64 + states[:, None] * 64 + i[None, :], new.to(dtype))
        scaled = (rows_k.to(tl.float32) * (write * tl.exp(G))[:, None]).to(dtype)
        read = tl.dot(t, scaled, input_precision=PRECISION)
        tl.store(w + place * 64 * BK + tile, read.to(dtype))
