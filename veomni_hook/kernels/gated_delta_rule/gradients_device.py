"""Device code of the gated delta rule's gradients within chunks; `triton` launches it.

Names as in `local_device` and `scan_device`; all products are of one chunk and one head. With dN the gradient
of what is written, and S, dS those of the states:

dU = dN,  dW = -dN @ S,  X = T^T @ dU,  Y = T^T @ dW,  dA = -(X @ U^T + Y @ W^T)  below the diagonal
dv = beta * X,  dk from Y, dA, P and the state,  dq from P and the state
dg from the exponents of all of them, summed from the end of the chunk
"""

import triton
import triton.language as tl

from veomni_hook.kernels.gated_delta_rule.local_device import EPS, read_columns, read_rows, write_columns

__all__ = ["through_states", "through_system", "through_values"]


@triton.jit
def _through_norm(dy, x):
    """The gradient in front of l2 normalisation, transposed: rsqrt(sum) * (dy - y * sum(dy * y))."""
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) + EPS)[None, :]
    y = wide * scale
    return scale * (dy - y * tl.sum(dy * y, axis=0)[None, :])


@triton.jit
def through_states(
    query,  # as in `local`
    starts,
    ends,
    q,
    k,
    total,
    states,  # as in `scan_device`
    written,
    dstates,
    dy,
    dquery,  # [tokens, HEADS // GROUPS, K]: a result
    dk,  # [chunks, HEADS // GROUPS, 64, BK], float32: a result, of what is computed here
    dtotal,  # [chunks, HEADS, 64], float32: the same
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    QT: tl.constexpr,
    QH: tl.constexpr,
    SCALE: tl.constexpr,
    NORMALISE: tl.constexpr,
    PRECISION: tl.constexpr,
    PART: tl.constexpr,
    STAGES: tl.constexpr,
):
    """What positions read of the state and of each other, and what they write. Grid: chunks, key heads."""
    chunk = tl.program_id(0).to(tl.int64)
    key_head = tl.program_id(1)
    dtype = q.dtype.element_ty
    i, columns, rows = tl.arange(0, 64), tl.arange(0, BK), tl.arange(0, PART)
    token = tl.load(starts + chunk).to(tl.int64)
    length = tl.load(ends + chunk) - token
    column = rows[:, None] * 64 + i[None, :]
    square = rows[:, None] * BK + columns[None, :]
    lower = i[:, None] >= i[None, :]

    tile = (chunk * (HEADS // GROUPS) + key_head) * 64 * BK + i[:, None] * BK + columns[None, :]
    asked = tl.load(q + tile)
    keys = tl.load(k + tile)
    wide_q, wide_k = tl.trans(asked).to(tl.float32), tl.trans(keys).to(tl.float32)
    sum_q = tl.zeros((BK, 64), tl.float32)
    sum_k = tl.zeros((BK, 64), tl.float32)
    # Their products with q and k, summed by position: those of the heads before are subtracted.
    of_q, of_k = tl.zeros((64,), tl.float32), tl.zeros((64,), tl.float32)
    for group in range(GROUPS):
        head = key_head * GROUPS + group
        place = chunk * HEADS + head
        G = tl.load(total + place * 64 + i)
        last = tl.load(total + place * 64 + 63)
        grown, left = SCALE * tl.exp(G), tl.exp(last - G)
        weights = tl.zeros((64, 64), tl.float32)
        dlast = 0.0
        # In parts, whose loads run ahead of products without registers.
        for part in tl.range(0, BV, PART, num_stages=STAGES):
            given = read_rows(dy + part, token, head, length, HEADS * V, V, V - part, PART)
            new = tl.load(written + (place * BV + part) * 64 + column)
            state = tl.load(states + (place * BV + part) * BK + square)
            dstate = tl.load(dstates + (place * BV + part) * BK + square)
            weights = tl.dot(given, new, weights, input_precision=PRECISION)
            sum_q += tl.dot(tl.trans(state), tl.trans(given), input_precision=PRECISION) * grown[None, :]
            product = tl.dot(tl.trans(dstate), new, input_precision=PRECISION) * left[None, :]
            sum_k += product
            dlast += tl.sum(product * wide_k) + tl.exp(last) * tl.sum(
                state.to(tl.float32) * dstate.to(tl.float32)
            )
        dscores = weights * (SCALE * tl.exp(tl.where(lower, G[:, None] - G[None, :], float("-inf"))))
        sum_q = tl.dot(tl.trans(keys), tl.trans(dscores.to(dtype)), sum_q, input_precision=PRECISION)
        sum_k = tl.dot(tl.trans(asked), dscores.to(dtype), sum_k, input_precision=PRECISION)
        now_q, now_k = tl.sum(sum_q * wide_q, axis=0), tl.sum(sum_k * wide_k, axis=0)
        change = (now_q - of_q) - (now_k - of_k) + tl.where(i == 63, dlast, 0.0)
        tl.store(dtotal + place * 64 + i, change)
        of_q, of_k = now_q, now_k

    tl.store(dk + tile, tl.trans(sum_k))
    if NORMALISE:
        sum_q = _through_norm(sum_q, read_columns(query, token, key_head, length, QT, QH, K, BK))
    write_columns(dquery, sum_q, token, key_head, length, HEADS // GROUPS * K, K, K, BK)


@triton.jit
def through_values(
    value,
    states,
    dwritten,
    u,
    dvalue,
    t,  # [64, 64]
    write,  # [64]: beta
    token,
    head,
    length,
    place,
    HEADS: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    VT: tl.constexpr,
    VH: tl.constexpr,
    PRECISION: tl.constexpr,
    PART: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Write dv; return what beta receives by it, U^T @ X, and S^T @ dN."""
    i, columns, rows = tl.arange(0, 64), tl.arange(0, BK), tl.arange(0, PART)
    column = rows[:, None] * 64 + i[None, :]
    square = rows[:, None] * BK + columns[None, :]
    dwrite = tl.zeros((64,), tl.float32)
    dsystem = tl.zeros((64, 64), tl.float32)
    dread = tl.zeros((BK, 64), tl.float32)
    # In parts, whose loads run ahead of products without registers.
    for part in tl.range(0, BV, PART, num_stages=STAGES):
        dnew = tl.load(dwritten + (place * BV + part) * 64 + column)
        state = tl.load(states + (place * BV + part) * BK + square)
        new = tl.load(u + (place * BV + part) * 64 + column)
        given = read_columns(value + part, token, head, length, VT, VH, V - part, PART)
        x = tl.dot(dnew, t, input_precision=PRECISION)
        dread = tl.dot(tl.trans(state), dnew, dread, input_precision=PRECISION)
        dwrite += tl.sum(x * given.to(tl.float32), axis=0)
        write_columns(dvalue + part, x * write[None, :], token, head, length, HEADS * V, V, V - part, PART)
        dsystem = tl.dot(tl.trans(new), x.to(dwritten.dtype.element_ty), dsystem, input_precision=PRECISION)
    return dwrite, dsystem, dread


@triton.jit
def through_system(
    key,  # as in `local`
    value,
    beta,
    starts,
    ends,
    k,
    total,
    solved,
    w,
    u,
    states,  # as in `scan_device`
    dwritten,
    dk,  # of `through_states`
    dtotal,  # the same
    dkey,  # [tokens, HEADS // GROUPS, K]: a result
    dvalue,  # [tokens, HEADS, V]: a result
    dg,  # [tokens, HEADS]: a result
    dbeta,  # the same
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    KT: tl.constexpr,
    KH: tl.constexpr,
    VT: tl.constexpr,
    VH: tl.constexpr,
    NORMALISE: tl.constexpr,
    PRECISION: tl.constexpr,
    PART: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The chunk's system, and the sums of all gradients. Grid: chunks, key heads."""
    chunk = tl.program_id(0).to(tl.int64)
    key_head = tl.program_id(1)
    dtype = w.dtype.element_ty
    i, columns = tl.arange(0, 64), tl.arange(0, BK)
    token = tl.load(starts + chunk).to(tl.int64)
    length = tl.load(ends + chunk) - token
    above = i[:, None] < i[None, :]

    shared = (chunk * (HEADS // GROUPS) + key_head) * 64 * BK
    tile = i[:, None] * BK + columns[None, :]
    for group in range(GROUPS):
        head = key_head * GROUPS + group
        place = chunk * HEADS + head
        write = tl.load(beta + token * HEADS + head + i * HEADS, mask=i < length, other=0.0).to(tl.float32)
        t = tl.load(solved + place * 64 * 64 + i[:, None] * 64 + i[None, :])
        dwrite, dsystem, dread = through_values(
            value, states, dwritten, u, dvalue, t, write, token, head, length, place,
            HEADS, V, BK, BV, VT, VH, PRECISION, PART, STAGES,
        )  # fmt: skip

        # Of keys, decayed.
        y = tl.dot((-dread).to(dtype), t, input_precision=PRECISION)
        reading = tl.load(w + place * 64 * BK + tile)
        dsystem = tl.dot(reading, y.to(dtype), dsystem, input_precision=PRECISION)
        G = tl.load(total + place * 64 + i)
        grown = tl.exp(G)
        keys = tl.load(k + shared + tile)
        product = tl.sum(y * tl.trans(keys).to(tl.float32), axis=0) * grown
        dwrite += product
        change = tl.load(dtotal + place * 64 + i) + product * write

        # Of the system, transposed.
        overlap = tl.dot(keys, tl.trans(keys), input_precision=PRECISION)
        dsystem *= -tl.exp(tl.where(above, G[None, :] - G[:, None], float("-inf")))
        overlap *= dsystem
        dwrite += tl.sum(overlap, axis=0)
        overlap *= write[None, :]
        change += tl.sum(overlap, axis=0) - tl.sum(overlap, axis=1)
        doverlap = (dsystem * write[None, :]).to(dtype)
        sum_k = y * (write * grown)[None, :]
        sum_k = tl.dot(tl.trans(keys), doverlap, sum_k, input_precision=PRECISION)
        sum_k = tl.dot(tl.trans(keys), tl.trans(doverlap), sum_k, input_precision=PRECISION)
        # The sum over heads waits in memory: registers hold too much already.
        sum_k += tl.trans(tl.load(dk + shared + tile))
        tl.store(dk + shared + tile, tl.trans(sum_k))
        tl.debug_barrier()
        at = token * HEADS + head + i * HEADS
        tl.store(dg + at, tl.cumsum(change, axis=0, reverse=True).to(dg.dtype.element_ty), mask=i < length)
        tl.store(dbeta + at, dwrite.to(dbeta.dtype.element_ty), mask=i < length)

    sum_k = tl.trans(tl.load(dk + shared + tile))
    if NORMALISE:
        sum_k = _through_norm(sum_k, read_columns(key, token, key_head, length, KT, KH, K, BK))
    write_columns(dkey, sum_k, token, key_head, length, HEADS // GROUPS * K, K, K, BK)
