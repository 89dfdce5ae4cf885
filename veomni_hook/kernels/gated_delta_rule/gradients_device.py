"""Device code of the gated delta rule's gradients within chunks; `triton` launches it.

Names as in `local_device` and `scan_device`; all products are of one chunk and one head. With dN the gradient
of what is written, and S, dS those of the states:

dU = dN,  dW = -dN @ S,  X = T^T @ dU,  Y = T^T @ dW,  dA = -(X @ U^T + Y @ W^T)  below the diagonal
dv = beta * X,  dk from Y, dA, P and the state,  dq from P and the state
dg from the exponents of all of them, summed from the end of the chunk

Rows are positions: a sum over channels then stays within a warp.
"""

import triton
import triton.language as tl

from veomni_hook.kernels.gated_delta_rule.local_device import EPS, read_rows, write_rows

__all__ = ["through_reads", "through_states", "through_system", "through_values"]


@triton.jit
def _through_norm(dy, x):
    """The gradient in front of l2 normalisation: rsqrt(sum) * (dy - y * sum(dy * y)), sums of rows."""
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=1) + EPS)[:, None]
    y = wide * scale
    return scale * (dy - y * tl.sum(dy * y, axis=1)[:, None])


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
    sum_q = tl.zeros((64, BK), tl.float32)
    sum_k = tl.zeros((64, BK), tl.float32)
    # Their products with q and k, summed by position: those of the heads before are subtracted.
    of_q, of_k = tl.zeros((64,), tl.float32), tl.zeros((64,), tl.float32)
    for group in range(GROUPS):
        head = key_head * GROUPS + group
        place = chunk * HEADS + head
        G = tl.load(total + place * 64 + i)
        last = tl.load(total + place * 64 + 63)
        grown, left = SCALE * tl.exp(G), tl.exp(last - G)
        weights = tl.zeros((64, 64), tl.float32)
        decayed = tl.zeros((PART,), tl.float32)
        # In parts, whose loads run ahead of products without registers.
        for part in tl.range(0, BV, PART, num_stages=STAGES):
            gradient = read_rows(dy + part, token, head, length, HEADS * V, V, V - part, PART)
            new = tl.load(written + (place * BV + part) * 64 + column)
            state = tl.load(states + (place * BV + part) * BK + square)
            dstate = tl.load(dstates + (place * BV + part) * BK + square)
            weights = tl.dot(gradient, new, weights, input_precision=PRECISION)
            sum_q += tl.dot(gradient, state, input_precision=PRECISION) * grown[:, None]
            sum_k += tl.dot(tl.trans(new), dstate, input_precision=PRECISION) * left[:, None]
            decayed += tl.sum(state.to(tl.float32) * dstate.to(tl.float32), axis=1)
        # What is written decays with all that is behind it.
        behind = tl.sum(sum_k * keys.to(tl.float32), axis=1) - of_k
        dlast = tl.sum(behind) + tl.exp(last) * tl.sum(decayed)
        dscores = weights * (SCALE * tl.exp(tl.where(lower, G[:, None] - G[None, :], float("-inf"))))
        sum_q = tl.dot(dscores.to(dtype), keys, sum_q, input_precision=PRECISION)
        sum_k = tl.dot(tl.trans(dscores.to(dtype)), asked, sum_k, input_precision=PRECISION)
        now_q = tl.sum(sum_q * asked.to(tl.float32), axis=1)
        now_k = tl.sum(sum_k * keys.to(tl.float32), axis=1)
        change = (now_q - of_q) - (now_k - of_k) + tl.where(i == 63, dlast, 0.0)
        tl.store(dtotal + place * 64 + i, change)
        of_q, of_k = now_q, now_k

    tl.store(dk + tile, sum_k)
    if NORMALISE:
        sum_q = _through_norm(sum_q, read_rows(query, token, key_head, length, QT, QH, K, BK))
    write_rows(dquery, sum_q, token, key_head, length, HEADS // GROUPS * K, K, K, BK)


@triton.jit
def through_reads(
    states,
    dwritten,
    t,  # [64, 64]
    place,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PRECISION: tl.constexpr,
    PART: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Return Y, [64, BK]."""
    i, columns, rows = tl.arange(0, 64), tl.arange(0, BK), tl.arange(0, PART)
    column = rows[:, None] * 64 + i[None, :]
    square = rows[:, None] * BK + columns[None, :]
    dread = tl.zeros((64, BK), tl.float32)
    # In parts, whose loads run ahead of products without registers.
    for part in tl.range(0, BV, PART, num_stages=STAGES):
        dnew = tl.load(dwritten + (place * BV + part) * 64 + column)
        state = tl.load(states + (place * BV + part) * BK + square)
        dread = tl.dot(tl.trans(dnew), state, dread, input_precision=PRECISION)
    return tl.dot(tl.trans(t), (-dread).to(dwritten.dtype.element_ty), input_precision=PRECISION)


@triton.jit
def through_values(
    value,
    dwritten,
    u,
    dvalue,
    t,  # [64, 64]
    write,  # [64]: beta
    dsystem,  # [64, 64]
    token,
    head,
    length,
    place,
    HEADS: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    VT: tl.constexpr,
    VH: tl.constexpr,
    PRECISION: tl.constexpr,
    PART: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Write dv; return what beta receives by it, and dsystem + X @ U^T."""
    i, rows = tl.arange(0, 64), tl.arange(0, PART)
    column = rows[:, None] * 64 + i[None, :]
    dwrite = tl.zeros((64,), tl.float32)
    for part in tl.range(0, BV, PART, num_stages=STAGES):
        dnew = tl.load(dwritten + (place * BV + part) * 64 + column)
        new = tl.load(u + (place * BV + part) * 64 + column)
        values = read_rows(value + part, token, head, length, VT, VH, V - part, PART)
        x = tl.dot(tl.trans(t), tl.trans(dnew), input_precision=PRECISION)
        dwrite += tl.sum(x * values.to(tl.float32), axis=1)
        write_rows(dvalue + part, x * write[:, None], token, head, length, HEADS * V, V, V - part, PART)
        dsystem = tl.dot(x.to(dwritten.dtype.element_ty), new, dsystem, input_precision=PRECISION)
    return dwrite, dsystem


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
    """The chunk's system, and the sums of all gradients. Grid: chunks, key heads.

    Y first, then X: registers do not hold dW, X and the sum over heads at once.
    """
    chunk = tl.program_id(0).to(tl.int64)
    key_head = tl.program_id(1)
    dtype = w.dtype.element_ty
    i, columns = tl.arange(0, 64), tl.arange(0, BK)
    token = tl.load(starts + chunk).to(tl.int64)
    length = tl.load(ends + chunk) - token
    below = i[:, None] > i[None, :]

    shared = (chunk * (HEADS // GROUPS) + key_head) * 64 * BK
    tile = i[:, None] * BK + columns[None, :]
    sum_k = tl.load(dk + shared + tile)
    for group in range(GROUPS):
        head = key_head * GROUPS + group
        place = chunk * HEADS + head
        write = tl.load(beta + token * HEADS + head + i * HEADS, mask=i < length, other=0.0).to(tl.float32)
        t = tl.load(solved + place * 64 * 64 + i[:, None] * 64 + i[None, :])
        G = tl.load(total + place * 64 + i)
        grown = tl.exp(G)
        keys = tl.load(k + shared + tile)

        # Of keys, decayed.
        y = through_reads(states, dwritten, t, place, BK, BV, PRECISION, PART, STAGES)
        sum_k += y * (write * grown)[:, None]
        reading = tl.load(w + place * 64 * BK + tile)
        dsystem = tl.dot(y.to(dtype), tl.trans(reading), input_precision=PRECISION)
        # Sums of y * k: the diagonal of a product costs less than keys in another layout.
        product = tl.dot(y.to(dtype), tl.trans(keys), input_precision=PRECISION)
        product = grown * tl.sum(tl.where(i[:, None] == i[None, :], product, 0.0), axis=1)
        dwrite, dsystem = through_values(
            value, dwritten, u, dvalue, t, write, dsystem, token, head, length, place,
            HEADS, V, BV, VT, VH, PRECISION, PART, STAGES,
        )  # fmt: skip
        dwrite += product
        change = tl.load(dtotal + place * 64 + i) + product * write

        # Of the system.
        overlap = tl.dot(keys, tl.trans(keys), input_precision=PRECISION)
        dsystem *= -tl.exp(tl.where(below, G[:, None] - G[None, :], float("-inf")))
        overlap *= dsystem
        dwrite += tl.sum(overlap, axis=1)
        overlap *= write[:, None]
        change += tl.sum(overlap, axis=1) - tl.sum(overlap, axis=0)
        # One product for both sides of a pair: above the diagonal are zeros.
        doverlap = (dsystem * write[:, None]).to(dtype)
        sum_k = tl.dot(doverlap + tl.trans(doverlap), keys, sum_k, input_precision=PRECISION)
        at = token * HEADS + head + i * HEADS
        tl.store(dg + at, tl.cumsum(change, axis=0, reverse=True).to(dg.dtype.element_ty), mask=i < length)
        tl.store(dbeta + at, dwrite.to(dbeta.dtype.element_ty), mask=i < length)

    if NORMALISE:
        sum_k = _through_norm(sum_k, read_rows(key, token, key_head, length, KT, KH, K, BK))
    write_rows(dkey, sum_k, token, key_head, length, HEADS // GROUPS * K, K, K, BK)
