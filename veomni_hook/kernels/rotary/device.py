"""The device code of rotary embedding; `veomni_hook.kernels.rotary.triton` describes what it computes.

A program rotates a tile of rows: ``POSITIONS`` positions by ``HEADS`` heads, heads first. Each row has
``COUPLES`` couples and ``REST`` numbers that do not change.
"""

import triton
import triton.language as tl

__all__ = ["rotate"]


@triton.jit
def _load(
    x, place, kept, COUPLES: tl.constexpr, BLOCK: tl.constexpr, PAIRS: tl.constexpr, STAYS: tl.constexpr
):
    """The two members of every couple of the rows that begin at ``place``, as stored.

    ``STAYS``: the cache evicts these numbers last.
    """
    EVICTION: tl.constexpr = "evict_last" if STAYS else ""
    if PAIRS:
        # Neighbours are loaded together and split in registers: separate loads would be of 2 bytes.
        column = tl.arange(0, 2 * BLOCK)
        inside = kept[:, None]
        if BLOCK != COUPLES:
            inside = inside & (column < 2 * COUPLES)[None, :]
        at = x + place[:, None] + column[None, :]
        both = tl.load(at, mask=inside, other=0.0, eviction_policy=EVICTION)
        first, second = tl.split(tl.reshape(both, [both.shape[0], BLOCK, 2]))
    else:
        column = tl.arange(0, BLOCK)
        inside = kept[:, None]
        if BLOCK != COUPLES:
            inside = inside & (column < COUPLES)[None, :]
        first = tl.load(
            x + place[:, None] + column[None, :], mask=inside, other=0.0, eviction_policy=EVICTION
        )
        second = tl.load(
            x + place[:, None] + (column + COUPLES)[None, :], mask=inside, other=0.0, eviction_policy=EVICTION
        )
    return first, second


@triton.jit
def _store(y, place, kept, first, second, COUPLES: tl.constexpr, BLOCK: tl.constexpr, PAIRS: tl.constexpr):
    if PAIRS:
        column = tl.arange(0, 2 * BLOCK)
        inside = kept[:, None]
        if BLOCK != COUPLES:
            inside = inside & (column < 2 * COUPLES)[None, :]
        both = tl.reshape(tl.join(first, second), [first.shape[0], 2 * BLOCK])
        tl.store(y + place[:, None] + column[None, :], both, mask=inside)
    else:
        column = tl.arange(0, BLOCK)
        inside = kept[:, None]
        if BLOCK != COUPLES:
            inside = inside & (column < COUPLES)[None, :]
        tl.store(y + place[:, None] + column[None, :], first, mask=inside)
        tl.store(y + place[:, None] + (column + COUPLES)[None, :], second, mask=inside)


@triton.jit
def _table(table, place, kept, COUPLES: tl.constexpr, BLOCK: tl.constexpr, TABLE: tl.constexpr):
    """The factors of the first and the second members."""
    # Rows stream through the cache, and every head reads the tables again: keeping them saves 2 %.
    if TABLE == 0:
        inside = kept[:, None]
        column = tl.arange(0, BLOCK)
        if BLOCK != COUPLES:
            inside = inside & (column < COUPLES)[None, :]
        first = tl.load(
            table + place[:, None] + column[None, :], mask=inside, other=0.0, eviction_policy="evict_last"
        )
        second = first
    else:
        first, second = _load(table, place, kept, COUPLES, BLOCK, TABLE == 2, True)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def _rows(
    x, y, cos, sin, batch, begin, head, length, heads, xb, xs, xh, yb, ys, yh, tb, ts,
    COUPLES: tl.constexpr, BLOCK: tl.constexpr, ROTATED: tl.constexpr, REST: tl.constexpr,
    REST_AT: tl.constexpr, REST_BLOCK: tl.constexpr, POSITIONS: tl.constexpr, HEADS: tl.constexpr,
    PAIRS_IN: tl.constexpr, PAIRS_OUT: tl.constexpr, TABLE: tl.constexpr, BACK: tl.constexpr,
    SWAPPED: tl.constexpr, MIDDLE: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, POSITIONS * HEADS)
    position = begin + row // HEADS
    head = head.to(tl.int64) + row % HEADS
    kept = (position < length) & (head < heads)
    place = batch * xb + position * xs + head * xh
    target = batch * yb + position * ys + head * yh
    x1, x2 = _load(x + ROTATED, place, kept, COUPLES, BLOCK, PAIRS_IN, False)
    if POSITIONS == 1:
        # One row of the tables for all heads.
        where = batch * tb + (begin + tl.arange(0, 1)) * ts
        known = tl.full([1], 1, tl.int1)
    else:
        where = batch * tb + position * ts
        known = kept
    cos1, cos2 = _table(cos, where, known, COUPLES, BLOCK, TABLE)
    sin1, sin2 = _table(sin, where, known, COUPLES, BLOCK, TABLE)
    if SWAPPED:
        sin1, sin2 = sin2, sin1
    x1 = x1.to(tl.float32)
    x2 = x2.to(tl.float32)
    a = (x1 * cos1).to(MIDDLE).to(tl.float32)
    b = (x2 * sin1).to(MIDDLE).to(tl.float32)
    c = (x2 * cos2).to(MIDDLE).to(tl.float32)
    d = (x1 * sin2).to(MIDDLE).to(tl.float32)
    if BACK:
        y1 = a + b
        y2 = c - d
    else:
        y1 = a - b
        y2 = c + d
    y1 = y1.to(MIDDLE).to(y.dtype.element_ty)
    y2 = y2.to(MIDDLE).to(y.dtype.element_ty)
    _store(y + ROTATED, target, kept, y1, y2, COUPLES, BLOCK, PAIRS_OUT)
    if REST:
        column = tl.arange(0, REST_BLOCK)
        inside = kept[:, None] & (column < REST)[None, :]
        rest = tl.load(x + REST_AT + place[:, None] + column[None, :], mask=inside, other=0.0)
        rest = rest.to(y.dtype.element_ty)
        tl.store(y + REST_AT + target[:, None] + column[None, :], rest, mask=inside)


@triton.jit
def rotate(
    q, k, q_out, k_out, cos, sin, length, blocks, q_heads, k_heads, q_shares, shares,
    qb, qs, qh, kb, ks, kh, rb, rs, rh, ob, os, oh, tb, ts,
    COUPLES: tl.constexpr, BLOCK: tl.constexpr, ROTATED: tl.constexpr, REST: tl.constexpr,
    REST_AT: tl.constexpr, REST_BLOCK: tl.constexpr, POSITIONS: tl.constexpr, Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr, PAIRS_IN: tl.constexpr, PAIRS_OUT: tl.constexpr, TABLE: tl.constexpr,
    BACK: tl.constexpr, SWAPPED: tl.constexpr, MIDDLE: tl.constexpr,
):  # fmt: skip
    """Rotate q into q_out and k into k_out; per block of positions, ``q_shares`` of ``shares`` programs do q.

    Strides are those of batch, positions and heads: of q (qb, qs, qh), k, q_out (rb, rs, rh), k_out (ob, os,
    oh), and of cos and sin.
    """
    number = tl.program_id(0)
    share = number % shares
    block = number // shares
    batch = (block // blocks).to(tl.int64)
    begin = (block % blocks).to(tl.int64) * POSITIONS
    # Two calls instead of a selected pointer: the compiler knows only the alignment of arguments.
    if share < q_shares:
        _rows(
            q, q_out, cos, sin, batch, begin, share * Q_HEADS, length, q_heads,
            qb, qs, qh, rb, rs, rh, tb, ts, COUPLES, BLOCK, ROTATED, REST, REST_AT, REST_BLOCK,
            POSITIONS, Q_HEADS, PAIRS_IN, PAIRS_OUT, TABLE, BACK, SWAPPED, MIDDLE,
        )  # fmt: skip
    else:
        _rows(
            k, k_out, cos, sin, batch, begin, (share - q_shares) * K_HEADS, length, k_heads,
            kb, ks, kh, ob, os, oh, tb, ts, COUPLES, BLOCK, ROTATED, REST, REST_AT, REST_BLOCK,
            POSITIONS, K_HEADS, PAIRS_IN, PAIRS_OUT, TABLE, BACK, SWAPPED, MIDDLE,
        )  # fmt: skip
