"""Device code of the gradients within chunks, with a decay for each channel; `triton` launches it.

Names as in `channel_device` and `gradients_device`. Both halves of a product need the same decays for their
gradients as for the product, so the gradient of P is kept with its transpose above the diagonal, and that of
A likewise, with beta: one product a size then gives what both halves receive. A pair's exponent grows with g
at the later position and falls with g at the earlier one, so the gradient of G is what one receives less what
the other does, in the rounding of the products; that of g is the sum of it from the end of the chunk.
"""

import triton
import triton.language as tl

from veomni_hook.kernels.gated_delta_rule.channel_device import (
    extend,
    in_blocks,
    is_later,
    mild,
    neighbours,
    row_scale,
)
from veomni_hook.kernels.gated_delta_rule.gradients_device import through_reads, through_values
from veomni_hook.kernels.gated_delta_rule.local_device import read_rows

__all__ = ["through_products", "through_states", "through_system"]


@triton.jit
def through_states(
    starts,  # as in `local`
    ends,
    states,  # as in `scan_device`
    written,
    dstates,
    dy,
    dp,  # [chunks, HEADS, 64, 64]: a result, the gradient of P and its transpose
    dq,  # [chunks, HEADS, 64, BK], float32: a result, of the decayed q
    dk,  # the same of k
    dtotal,  # [chunks, HEADS, BK], float32: a result, what L receives from the state
    HEADS: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PRECISION: tl.constexpr,
    PART: tl.constexpr,
    STAGES: tl.constexpr,
):
    """What positions read of the state and of each other, and what they write. Grid: chunks, heads."""
    chunk = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    place = chunk * HEADS + head
    i, columns, rows = tl.arange(0, 64), tl.arange(0, BK), tl.arange(0, PART)
    token = tl.load(starts + chunk).to(tl.int64)
    length = tl.load(ends + chunk) - token
    column = rows[:, None] * 64 + i[None, :]
    square = rows[:, None] * BK + columns[None, :]
    weights = tl.zeros((64, 64), tl.float32)
    sum_q = tl.zeros((64, BK), tl.float32)
    sum_k = tl.zeros((64, BK), tl.float32)
    overlap = tl.zeros((BK,), tl.float32)
    # In parts, whose loads run ahead of products without registers.
    for part in tl.range(0, BV, PART, num_stages=STAGES):
        gradient = read_rows(dy + part, token, head, length, HEADS * V, V, V - part, PART)
        new = tl.load(written + (place * BV + part) * 64 + column)
        state = tl.load(states + (place * BV + part) * BK + square)
        dstate = tl.load(dstates + (place * BV + part) * BK + square)
        weights = tl.dot(gradient, new, weights, input_precision=PRECISION)
        sum_q = tl.dot(gradient, state, sum_q, input_precision=PRECISION)
        sum_k = tl.dot(tl.trans(new), dstate, sum_k, input_precision=PRECISION)
        overlap += tl.sum(state.to(tl.float32) * dstate.to(tl.float32), axis=0)
    kept = weights.to(dp.dtype.element_ty)
    at = dp + place * 64 * 64
    tl.store(at + i[:, None] * 64 + i[None, :], kept, mask=i[:, None] >= i[None, :])
    tl.store(at + i[None, :] * 64 + i[:, None], kept, mask=i[:, None] > i[None, :])
    tile = place * 64 * BK + i[:, None] * BK + columns[None, :]
    tl.store(dq + tile, sum_q)
    tl.store(dk + tile, sum_k)
    tl.store(dtotal + place * BK + columns, overlap)


@triton.jit
def through_system(
    value,  # as in `local`
    beta,
    starts,
    ends,
    solved,
    w,
    u,
    states,  # as in `scan_device`
    dwritten,
    da,  # [chunks, HEADS, 64, 64]: a result, the gradient of A / beta's row, and above it that of A / beta
    dread,  # [chunks, HEADS, 64, BK]: a result, of beta * exp(G) * key
    dvalue,  # [tokens, HEADS, V]: a result
    dwrite,  # [chunks, HEADS, 64], float32: a result, what beta receives from values
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
    """The chunk's system. Grid: chunks, heads."""
    chunk = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    place = chunk * HEADS + head
    dtype = w.dtype.element_ty
    i, columns = tl.arange(0, 64), tl.arange(0, BK)
    token = tl.load(starts + chunk).to(tl.int64)
    length = tl.load(ends + chunk) - token
    write = tl.load(beta + token * HEADS + head + i * HEADS, mask=i < length, other=0.0).to(tl.float32)
    t = tl.load(solved + place * 64 * 64 + i[:, None] * 64 + i[None, :])
    y = through_reads(states, dwritten, t, place, BK, BV, PRECISION, PART, STAGES)
    tile = place * 64 * BK + i[:, None] * BK + columns[None, :]
    reading = tl.load(w + tile)
    dsystem = tl.dot(y.to(dtype), tl.trans(reading), input_precision=PRECISION)
    of_write, dsystem = through_values(
        value, dwritten, u, dvalue, t, write, dsystem, token, head, length, place,
        HEADS, V, BV, VT, VH, PRECISION, PART, STAGES,
    )  # fmt: skip
    dsystem = -dsystem
    tl.store(dwrite + place * 64 + i, of_write)
    at = da + place * 64 * 64
    # The diagonal has none, and nothing reads it.
    below = i[:, None] > i[None, :]
    tl.store(at + i[:, None] * 64 + i[None, :], dsystem.to(dtype), mask=below)
    tl.store(at + i[None, :] * 64 + i[:, None], (dsystem * write[:, None]).to(dtype), mask=below)
    tl.store(dread + tile, y.to(dtype))


@triton.jit
def _through_halves(
    rows_q,
    rows_k,
    g,
    weights,
    system,
    own,
    write,
    sum_beta,
    SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
    PART: tl.constexpr,
):
    """What q, k and G receive from products of positions, [64, PART], and beta beside sum_beta.

    Returned at last: exp of the sums of g up to and with each position, and behind it.
    """
    dtype = weights.dtype
    none = tl.zeros((64, 64), dtype)
    before, after, first = tl.exp(g), tl.full((64, PART), 1.0, tl.float32), 0
    sum_q, sum_k = rows_k * (own * SCALE), rows_q * (own * SCALE)
    change = tl.zeros((64, PART), tl.float32)
    block_sums, whole, are_mild = mild(g, rows_k, PART) if dtype != tl.float16 else (g, g, False)
    if are_mild:
        before, after, first = tl.exp(block_sums), tl.exp(whole - block_sums), 5
        grown = tl.exp(-block_sums)
        kept = in_blocks()
        earlier, later_k = (rows_k * grown).to(dtype), (rows_k * before).to(dtype)
        later_q = (rows_q * (before * SCALE)).to(dtype)
        sums = tl.dot(tl.where(kept, weights, none), earlier, input_precision=PRECISION)
        sum_q += sums * before * SCALE
        change += later_q.to(tl.float32) * sums
        sums = tl.dot(tl.where(kept, system, none), earlier, input_precision=PRECISION)
        of_beta = later_k.to(tl.float32) * sums
        sum_beta += tl.sum(of_beta, axis=1)
        change += of_beta * write[:, None]
        sum_k += sums * before * write[:, None]
        # What is above the diagonal belongs to the earlier one of a pair.
        kept = tl.trans(kept)
        sums = tl.dot(tl.where(kept, weights, none), later_q, input_precision=PRECISION)
        sums = tl.dot(tl.where(kept, system, none), later_k, sums, input_precision=PRECISION)
        change -= earlier.to(tl.float32) * sums
        sum_k += sums * grown
    for level in range(first, 6):
        later = is_later(level)
        decay = tl.where(later, before, after)
        kept = neighbours(level)
        both = (tl.where(later, rows_q * SCALE, rows_k) * decay).to(dtype)
        sums = tl.dot(tl.where(kept, weights, none), both, input_precision=PRECISION)
        change += both.to(tl.float32) * tl.where(later, sums, -sums)
        sums *= decay
        sum_q += tl.where(later, sums * SCALE, 0.0)
        sum_k += tl.where(later, 0.0, sums)
        keys = (rows_k * decay).to(dtype)
        sums = tl.dot(tl.where(kept, system, none), keys, input_precision=PRECISION)
        of_beta = keys.to(tl.float32) * sums
        sum_beta += tl.sum(tl.where(later, of_beta, 0.0), axis=1)
        change += of_beta * tl.where(later, write[:, None], -1.0)
        sum_k += sums * decay * tl.where(later, write[:, None], 1.0)
        before, after = extend(before, after, level, PART)
    return sum_q, sum_k, change, sum_beta, before, after


@triton.jit
def _through_norm(
    x,
    dy,
    along,
    scale,
    dx,
    token,
    head,
    length,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    TOKEN: tl.constexpr,
    HEAD: tl.constexpr,
    PART: tl.constexpr,
):
    """Write what is in front of l2 normalisation: scale * (dy - y * along), along: sum(dy * y)."""
    i, columns = tl.arange(0, 64), tl.arange(0, PART)
    for part in range(0, BK, PART):
        inside = (i[:, None] < length) & (part + columns[None, :] < K)
        rows = read_rows(x + part, token, head, length, TOKEN, HEAD, K - part, PART).to(tl.float32)
        gradient = tl.load(dy + i[:, None] * BK + part + columns[None, :])
        through = (gradient - rows * (scale * along)[:, None]) * scale[:, None]
        to = i[:, None] * (HEADS * K) + columns[None, :]
        tl.store(dx + (token * HEADS + head) * K + part + to, through.to(dx.dtype.element_ty), mask=inside)


@triton.jit
def through_products(  # noqa: PLR0915 - one pass over what is loaded
    query,  # as in `local`
    key,
    g,
    beta,
    starts,
    ends,
    dp,  # of `through_states`
    dq,  # the same; changed
    dk,  # the same; changed
    dtotal,  # the same
    da,  # of `through_system`
    dread,  # the same
    dwrite,  # the same
    dquery,  # [tokens, HEADS, K]: a result
    dkey,  # the same
    dg,  # the same
    dbeta,  # [tokens, HEADS]: a result
    HEADS: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    QT: tl.constexpr,
    QH: tl.constexpr,
    KT: tl.constexpr,
    KH: tl.constexpr,
    GT: tl.constexpr,
    GH: tl.constexpr,
    SCALE: tl.constexpr,
    NORMALISE: tl.constexpr,
    PRECISION: tl.constexpr,
    PART: tl.constexpr,
):
    """What is of channels: the products of positions, and the sums of all gradients. Grid: chunks, heads."""
    chunk = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    place = chunk * HEADS + head
    i, columns = tl.arange(0, 64), tl.arange(0, PART)
    token = tl.load(starts + chunk).to(tl.int64)
    length = tl.load(ends + chunk) - token
    first = token * HEADS + head
    write = tl.load(beta + first + i * HEADS, mask=i < length, other=0.0).to(tl.float32)
    square = i[:, None] * 64 + i[None, :]
    weights, system = tl.load(dp + place * 64 * 64 + square), tl.load(da + place * 64 * 64 + square)
    tile, to = i[:, None] * BK + columns[None, :], i[:, None] * (HEADS * K) + columns[None, :]
    own = tl.load(dp + place * 64 * 64 + i * 65).to(tl.float32)[:, None]
    sum_beta = tl.load(dwrite + place * 64 + i)

    scale_q, scale_k = tl.full((64,), 1.0, tl.float32), tl.full((64,), 1.0, tl.float32)
    if NORMALISE:
        scale_q *= row_scale(query, token, head, length, QT, QH, K, BK)
        scale_k *= row_scale(key, token, head, length, KT, KH, K, BK)
    along_q, along_k = tl.zeros((64,), tl.float32), tl.zeros((64,), tl.float32)
    for part in range(0, BK, PART):
        rows_q = read_rows(query + part, token, head, length, QT, QH, K - part, PART)
        rows_q = rows_q.to(tl.float32) * scale_q[:, None]
        rows_k = read_rows(key + part, token, head, length, KT, KH, K - part, PART)
        rows_k = rows_k.to(tl.float32) * scale_k[:, None]
        decays = read_rows(g + part, token, head, length, GT, GH, K - part, PART).to(tl.float32)
        sum_q, sum_k, change, sum_beta, grown, left = _through_halves(
            rows_q, rows_k, decays, weights, system, own, write, sum_beta, SCALE, PRECISION, PART
        )

        # Of states: the decays are those from the start of the chunk, and to its end.
        rows = place * 64 * BK + part
        dq_rows = tl.load(dq + rows + tile) * (grown * SCALE)
        sum_q += dq_rows
        change += rows_q * dq_rows
        dq_rows = tl.load(dread + rows + tile).to(tl.float32) * grown
        of_beta = rows_k * dq_rows
        sum_beta += tl.sum(of_beta, axis=1)
        change += of_beta * write[:, None]
        sum_k += dq_rows * write[:, None]
        dq_rows = tl.load(dk + rows + tile) * left
        sum_k += dq_rows
        dq_rows *= rows_k
        # What is written decays with all that is behind it.
        whole = grown * tl.load(dtotal + place * BK + part + columns)[None, :]
        whole += tl.sum(dq_rows, axis=0)[None, :]
        change += tl.where(i[:, None] == 63, whole, 0.0) - dq_rows
        inside = (i[:, None] < length) & (part + columns[None, :] < K)
        start = first * K + part
        tl.store(
            dg + start + to, tl.cumsum(change, axis=0, reverse=True).to(dg.dtype.element_ty), mask=inside
        )
        if NORMALISE:
            along_q += tl.sum(sum_q * rows_q, axis=1)
            along_k += tl.sum(sum_k * rows_k, axis=1)
            tl.store(dq + rows + tile, sum_q)
            tl.store(dk + rows + tile, sum_k)
        else:
            tl.store(dquery + start + to, sum_q.to(dquery.dtype.element_ty), mask=inside)
            tl.store(dkey + start + to, sum_k.to(dkey.dtype.element_ty), mask=inside)

    tl.store(dbeta + first + i * HEADS, sum_beta.to(dbeta.dtype.element_ty), mask=i < length)
    if NORMALISE:
        # The sums over channels are of all parts.
        tl.debug_barrier()
        rows = place * 64 * BK
        _through_norm(
            query, dq + rows, along_q, scale_q, dquery, token, head, length, HEADS, K, BK, QT, QH, PART
        )
        _through_norm(key, dk + rows, along_k, scale_k, dkey, token, head, length, HEADS, K, BK, KT, KH, PART)
