"""Device code of the scan over chunks of the gated delta rule; `triton` launches it.

States are transposed, [V, K]: then both products that a chunk waits for have the running state or what was
just computed as their left operand, which a GPU of Hopper takes from registers. Operands of a chunk: see
`local_device`. With G the cumulative sum of g and L its last element, for one chunk:

Forward:  N = U - S @ W^T                        what is written  [V, 64]
          O = scale * exp(G) * (S @ q^T) + N @ P^T
          S = exp(L) * S + (exp(L - G) * N) @ k
Backward: dN = exp(L - G) * (dS @ k^T) + dO @ P
          dS = exp(L) * dS + (scale * exp(G) * dO) @ q - dN @ W

With a decay for each channel (CHANNELS), `channel_device` has put scale * exp(G) into q and exp(L - G) into
k, and exp(L) is a vector that scales the channels of the state.
"""

import triton
import triton.language as tl

__all__ = ["both", "forward"]


@triton.jit
def forward(
    q,  # [chunks, HEADS // GROUPS, 64, BK]
    k,  # the same
    total,  # [chunks, HEADS, 64], float32; if CHANNELS [chunks, HEADS, BK], exp(L)
    w,  # [chunks, HEADS, 64, BK]
    u,  # [chunks, HEADS, BV, 64]
    p,  # [chunks, HEADS, 64, 64]
    bounds,  # [samples + 1], int32: tokens
    first,  # [samples + 1], int32: chunks
    initial,  # [samples, HEADS, K, V], float32: read if INITIAL
    output,  # [tokens, HEADS, V]: a result if not KEEP
    final,  # [samples, HEADS, K, V], float32: a result if FINAL
    states,  # [chunks, HEADS, BV, BK]: S in front of each chunk, a result if KEEP
    written,  # [chunks, HEADS, BV, 64]: N, a result if KEEP
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    ROWS: tl.constexpr,  # of the state, for one program
    SCALE: tl.constexpr,
    INITIAL: tl.constexpr,
    FINAL: tl.constexpr,
    KEEP: tl.constexpr,
    CHANNELS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid: BV // ROWS, HEADS, samples; in `both` other programs come first."""
    head = tl.program_id(1) % HEADS
    sample = tl.program_id(2).to(tl.int64)
    dtype = w.dtype.element_ty
    i, columns = tl.arange(0, 64), tl.arange(0, BK)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    start = tl.load(bounds + sample).to(tl.int64)
    length = tl.load(bounds + sample + 1) - start
    outside = (sample * HEADS + head) * K * V + columns[None, :] * V + rows[:, None]
    inside = (columns[None, :] < K) & (rows[:, None] < V)
    if INITIAL:
        state = tl.load(initial + outside, mask=inside, other=0.0)
    else:
        state = tl.zeros((ROWS, BK), tl.float32)
    before = tl.load(first + sample).to(tl.int64)
    for step in range(tl.load(first + sample + 1) - tl.load(first + sample)):
        place = (before + step) * HEADS + head
        shared = ((before + step) * (HEADS // GROUPS) + head // GROUPS) * 64 * BK
        tile = i[:, None] * BK + columns[None, :]
        known = state.to(dtype)
        if CHANNELS:
            whole = tl.load(total + place * BK + columns)[None, :]
        else:
            G = tl.load(total + place * 64 + i)
            last = tl.load(total + place * 64 + 63)
            whole = tl.exp(last)
        reading = tl.load(w + place * 64 * BK + tile)
        column = rows[:, None] * 64 + i[None, :]
        new = tl.load(u + place * BV * 64 + column).to(tl.float32)
        new -= tl.dot(known, tl.trans(reading), input_precision=PRECISION)
        if KEEP:
            tl.store(states + place * BV * BK + rows[:, None] * BK + columns[None, :], known)
            tl.store(written + place * BV * 64 + column, new.to(dtype))
        else:
            asked = tl.load(q + shared + tile)
            weights = tl.load(p + place * 64 * 64 + i[:, None] * 64 + i[None, :])
            out = tl.dot(known, tl.trans(asked), input_precision=PRECISION)
            if not CHANNELS:
                out *= (SCALE * tl.exp(G))[None, :]
            out = tl.dot(new.to(dtype), tl.trans(weights), out, input_precision=PRECISION)
            keep = (step * 64 + i[None, :] < length) & (rows[:, None] < V)
            at = output + ((start + step * 64) * HEADS + head) * V + i[None, :] * (HEADS * V) + rows[:, None]
            tl.store(at, out.to(output.dtype.element_ty), mask=keep)
        keys = tl.load(k + shared + tile)
        if not CHANNELS:
            new *= tl.exp(last - G)[None, :]
        state = tl.dot(new.to(dtype), keys, state * whole, input_precision=PRECISION)
    if FINAL:
        tl.store(final + outside, state, mask=inside)


@triton.jit
def _backward(
    q,  # as in `forward`
    k,
    total,
    w,
    p,
    dy,  # [tokens, HEADS, V]: the gradient of the output
    bounds,
    first,
    dfinal,  # [samples, HEADS, K, V], float32: read if FINAL
    dinitial,  # the same: a result if INITIAL
    dstates,  # [chunks, HEADS, BV, BK]: dS behind each chunk, a result
    dwritten,  # [chunks, HEADS, BV, 64]: dN, a result
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    ROWS: tl.constexpr,
    SCALE: tl.constexpr,
    INITIAL: tl.constexpr,
    FINAL: tl.constexpr,
    CHANNELS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The scan from the last chunk to the first."""
    head = tl.program_id(1)
    sample = tl.program_id(2).to(tl.int64)
    dtype = w.dtype.element_ty
    i, columns = tl.arange(0, 64), tl.arange(0, BK)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    start = tl.load(bounds + sample).to(tl.int64)
    length = tl.load(bounds + sample + 1) - start
    before = tl.load(first + sample).to(tl.int64)
    number = tl.load(first + sample + 1) - tl.load(first + sample)
    outside = (sample * HEADS + head) * K * V + columns[None, :] * V + rows[:, None]
    inside = (columns[None, :] < K) & (rows[:, None] < V)
    if FINAL:
        state = tl.load(dfinal + outside, mask=inside, other=0.0)
    else:
        state = tl.zeros((ROWS, BK), tl.float32)
    for step in range(number):
        back = number - 1 - step
        place = (before + back) * HEADS + head
        shared = ((before + back) * (HEADS // GROUPS) + head // GROUPS) * 64 * BK
        tile = i[:, None] * BK + columns[None, :]
        known = state.to(dtype)
        tl.store(dstates + place * BV * BK + rows[:, None] * BK + columns[None, :], known)
        if CHANNELS:
            whole = tl.load(total + place * BK + columns)[None, :]
        else:
            G = tl.load(total + place * 64 + i)
            last = tl.load(total + place * 64 + 63)
            whole = tl.exp(last)
        keep = (back * 64 + i[:, None] < length) & (rows[None, :] < V)
        at = dy + ((start + back * 64) * HEADS + head) * V + i[:, None] * (HEADS * V) + rows[None, :]
        gradient = tl.trans(tl.load(at, mask=keep, other=0.0))
        weights = tl.load(p + place * 64 * 64 + i[:, None] * 64 + i[None, :])
        new = tl.dot(gradient, weights, input_precision=PRECISION)
        keys = tl.load(k + shared + tile)
        passed = tl.dot(known, tl.trans(keys), input_precision=PRECISION)
        if not CHANNELS:
            passed *= tl.exp(last - G)[None, :]
        new += passed
        tl.store(dwritten + place * BV * 64 + rows[:, None] * 64 + i[None, :], new.to(dtype))
        asked = tl.load(q + shared + tile)
        reading = tl.load(w + place * 64 * BK + tile)
        if not CHANNELS:
            gradient = (gradient.to(tl.float32) * (SCALE * tl.exp(G))[None, :]).to(dtype)
        state = tl.dot(gradient, asked, state * whole, input_precision=PRECISION)
        state = tl.dot((-new).to(dtype), reading, state, input_precision=PRECISION)
    if INITIAL:
        tl.store(dinitial + outside, state, mask=inside)


@triton.jit
def both(
    q,  # as in `forward`
    k,
    total,
    w,
    u,
    p,
    dy,  # [tokens, HEADS, V]: the gradient of the output
    bounds,
    first,
    initial,  # [samples, HEADS, K, V], float32: read if INITIAL
    dfinal,  # the same: read if FINAL
    dinitial,  # the same: a result if DINITIAL
    states,  # a result, as in `forward`
    written,  # the same
    dstates,  # [chunks, HEADS, BV, BK]: dS behind each chunk, a result
    dwritten,  # [chunks, HEADS, BV, 64]: dN, a result
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    ROWS: tl.constexpr,
    SCALE: tl.constexpr,
    INITIAL: tl.constexpr,
    FINAL: tl.constexpr,
    DINITIAL: tl.constexpr,
    CHANNELS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Both scans of the gradients at once: neither needs the other. Grid: BV // ROWS, 2 * HEADS, samples."""
    # The longer one begins.
    if tl.program_id(1) < HEADS:
        _backward(
            q, k, total, w, p, dy, bounds, first, dfinal, dinitial, dstates, dwritten,
            HEADS, GROUPS, K, V, BK, BV, ROWS, SCALE, DINITIAL, FINAL, CHANNELS, PRECISION,
        )  # fmt: skip
    else:
        forward(
            q, k, total, w, u, p, bounds, first, initial, dy, dinitial, states, written,
            HEADS, GROUPS, K, V, BK, BV, ROWS, SCALE, INITIAL, False, True, CHANNELS, PRECISION,
        )  # fmt: skip
