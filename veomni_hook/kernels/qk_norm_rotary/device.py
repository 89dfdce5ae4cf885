"""The device code of `veomni_hook.kernels.qk_norm_rotary.triton`, which describes what it computes.

A row is the ``COLUMNS`` numbers of one head at one position: two halves of ``HALF`` rotated numbers, and
``REST`` others. A program handles all heads of a position, so that cos and sin are read once.
"""

import triton
import triton.language as tl

from veomni_hook.kernels.rms_norm.device import _factor

__all__ = ["backward", "forward"]


@triton.jit
def _factors(weight, HALF: tl.constexpr, REST: tl.constexpr, HB: tl.constexpr, RB: tl.constexpr,
             FACTOR: tl.constexpr):  # fmt: skip
    """Factors of the normalised halves and the rest, in float32."""
    low, more = tl.arange(0, HB), tl.arange(0, RB)
    first = _factor(weight, low, low < HALF, FACTOR, HB)
    second = _factor(weight + HALF, low, low < HALF, FACTOR, HB)
    rest = _factor(weight + 2 * HALF, more, more < REST, FACTOR, RB)
    return first, second, rest


@triton.jit
def _tables(cos, sin, inside, HALF: tl.constexpr, HB: tl.constexpr):
    """cos and sin of both halves at one position, in float32; 0 at positions that are not ``inside``."""
    low = tl.arange(0, HB)
    kept = (low < HALF) & inside
    # Rows stream through the cache; keep the tables, which every batch reads again.
    c1 = tl.load(cos + low, mask=kept, other=0.0, eviction_policy="evict_last").to(tl.float32)
    c2 = tl.load(cos + HALF + low, mask=kept, other=0.0, eviction_policy="evict_last").to(tl.float32)
    s1 = tl.load(sin + low, mask=kept, other=0.0, eviction_policy="evict_last").to(tl.float32)
    s2 = tl.load(sin + HALF + low, mask=kept, other=0.0, eviction_policy="evict_last").to(tl.float32)
    return c1, c2, s1, s2


@triton.jit
def _read(x, begin, step, first, inside, HEADS: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr,
          CB: tl.constexpr):  # fmt: skip
    """``COUNT`` numbers of each of ``BLOCK`` heads, in float32."""
    head = first + tl.arange(0, BLOCK).to(tl.int64)
    column = tl.arange(0, CB)
    kept = ((head < HEADS) & inside)[:, None] & (column < COUNT)[None, :]
    place = begin + head[:, None] * step + column[None, :]
    return tl.load(x + place, mask=kept, other=0.0).to(tl.float32)


@triton.jit
def _write(y, begin, step, first, inside, value, HEADS: tl.constexpr, BLOCK: tl.constexpr,
           COUNT: tl.constexpr, CB: tl.constexpr):  # fmt: skip
    head = first + tl.arange(0, BLOCK).to(tl.int64)
    column = tl.arange(0, CB)
    kept = ((head < HEADS) & inside)[:, None] & (column < COUNT)[None, :]
    place = begin + head[:, None] * step + column[None, :]
    tl.store(y + place, value.to(y.dtype.element_ty), mask=kept)


@triton.jit
def _normed(x, scale, factor, MIDDLE: tl.constexpr, NORMED: tl.constexpr):
    xhat = (x * scale[:, None]).to(MIDDLE).to(tl.float32)
    return (xhat * factor[None, :]).to(NORMED).to(tl.float32)


@triton.jit
def _product(x, table, PRODUCT: tl.constexpr):
    return (x * table[None, :]).to(PRODUCT).to(tl.float32)


@triton.jit
def _turn(
    x, y, eps, begin, step, put, apart, inside, f1, f2, f3, c1, c2, s1, s2,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, HB: tl.constexpr,
    RB: tl.constexpr, MIDDLE: tl.constexpr, NORMED: tl.constexpr, PRODUCT: tl.constexpr,
):  # fmt: skip
    """Normalise and rotate all heads of one position of x into y."""
    COLUMNS: tl.constexpr = 2 * HALF + REST
    for first in tl.static_range(0, HEADS, BLOCK):
        x1 = _read(x, begin, step, first, inside, HEADS, BLOCK, HALF, HB)
        x2 = _read(x, begin + HALF, step, first, inside, HEADS, BLOCK, HALF, HB)
        squares = tl.sum(x1 * x1 + x2 * x2, axis=1)
        if REST:
            x3 = _read(x, begin + 2 * HALF, step, first, inside, HEADS, BLOCK, REST, RB)
            squares += tl.sum(x3 * x3, axis=1)
        scale = tl.rsqrt(squares / COLUMNS + eps)
        n1 = _normed(x1, scale, f1, MIDDLE, NORMED)
        n2 = _normed(x2, scale, f2, MIDDLE, NORMED)
        y1 = _product(n1, c1, PRODUCT) - _product(n2, s1, PRODUCT)
        y2 = _product(n2, c2, PRODUCT) + _product(n1, s2, PRODUCT)
        _write(y, put, apart, first, inside, y1, HEADS, BLOCK, HALF, HB)
        _write(y, put + HALF, apart, first, inside, y2, HEADS, BLOCK, HALF, HB)
        if REST:
            n3 = _normed(x3, scale, f3, MIDDLE, NORMED)
            _write(y, put + 2 * HALF, apart, first, inside, n3, HEADS, BLOCK, REST, RB)


@triton.jit
def _turn_back(
    x, dy, dx, eps, begin, step, whence, pace, put, inside, f1, f2, f3, c1, c2, s1, s2, t1, t2, t3,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, HB: tl.constexpr,
    RB: tl.constexpr, MIDDLE: tl.constexpr, TO_WEIGHT: tl.constexpr,
):  # fmt: skip
    """Gradients of all heads of one position: dx, and their contribution to those of the factors."""
    COLUMNS: tl.constexpr = 2 * HALF + REST
    for first in tl.static_range(0, HEADS, BLOCK):
        x1 = _read(x, begin, step, first, inside, HEADS, BLOCK, HALF, HB)
        x2 = _read(x, begin + HALF, step, first, inside, HEADS, BLOCK, HALF, HB)
        y1 = _read(dy, whence, pace, first, inside, HEADS, BLOCK, HALF, HB)
        y2 = _read(dy, whence + HALF, pace, first, inside, HEADS, BLOCK, HALF, HB)
        n1 = y1 * c1[None, :] + y2 * s2[None, :]
        n2 = y2 * c2[None, :] - y1 * s1[None, :]
        g1, g2 = n1 * f1[None, :], n2 * f2[None, :]
        squares = tl.sum(x1 * x1 + x2 * x2, axis=1)
        along = tl.sum(g1 * x1 + g2 * x2, axis=1)
        if REST:
            x3 = _read(x, begin + 2 * HALF, step, first, inside, HEADS, BLOCK, REST, RB)
            n3 = _read(dy, whence + 2 * HALF, pace, first, inside, HEADS, BLOCK, REST, RB)
            g3 = n3 * f3[None, :]
            squares += tl.sum(x3 * x3, axis=1)
            along += tl.sum(g3 * x3, axis=1)
        scale = tl.rsqrt(squares / COLUMNS + eps)
        mean = along * scale / COLUMNS
        d1 = scale[:, None] * (g1 - x1 * scale[:, None] * mean[:, None])
        d2 = scale[:, None] * (g2 - x2 * scale[:, None] * mean[:, None])
        _write(dx, put, COLUMNS, first, inside, d1, HEADS, BLOCK, HALF, HB)
        _write(dx, put + HALF, COLUMNS, first, inside, d2, HEADS, BLOCK, HALF, HB)
        if REST:
            d3 = scale[:, None] * (g3 - x3 * scale[:, None] * mean[:, None])
            _write(dx, put + 2 * HALF, COLUMNS, first, inside, d3, HEADS, BLOCK, REST, RB)
        if TO_WEIGHT:
            t1 += n1 * (x1 * scale[:, None]).to(MIDDLE).to(tl.float32)
            t2 += n2 * (x2 * scale[:, None]).to(MIDDLE).to(tl.float32)
            if REST:
                t3 += n3 * (x3 * scale[:, None]).to(MIDDLE).to(tl.float32)
    return t1, t2, t3


@triton.jit
def forward(
    q, k, q_weight, k_weight, cos, sin, q_out, k_out, q_eps, k_eps, positions, length,
    qb, qh, qs, kb, kh, ks, cb, cs, sb, ss, ub, uh, us, vb, vh, vs,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, Q_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr,
    HALF: tl.constexpr, REST: tl.constexpr, HB: tl.constexpr, RB: tl.constexpr, FACTOR: tl.constexpr,
    MIDDLE: tl.constexpr, NORMED: tl.constexpr, PRODUCT: tl.constexpr, POSITIONS: tl.constexpr,
):  # fmt: skip
    """Normalise and rotate all heads of ``POSITIONS`` positions of q and k."""
    f1, f2, f3 = _factors(q_weight, HALF, REST, HB, RB, FACTOR)
    g1, g2, g3 = _factors(k_weight, HALF, REST, HB, RB, FACTOR)
    for number in tl.static_range(POSITIONS):
        position = tl.program_id(0) * POSITIONS + number
        inside = position < positions
        b, s = (position // length).to(tl.int64), (position % length).to(tl.int64)
        c1, c2, s1, s2 = _tables(cos + b * cb + s * cs, sin + b * sb + s * ss, inside, HALF, HB)
        _turn(
            q, q_out, q_eps, b * qb + s * qs, qh, b * ub + s * us, uh, inside, f1, f2, f3, c1, c2, s1, s2,
            Q_HEADS, Q_BLOCK, HALF, REST, HB, RB, MIDDLE, NORMED, PRODUCT,
        )  # fmt: skip
        _turn(
            k, k_out, k_eps, b * kb + s * ks, kh, b * vb + s * vs, vh, inside, g1, g2, g3, c1, c2, s1, s2,
            K_HEADS, K_BLOCK, HALF, REST, HB, RB, MIDDLE, NORMED, PRODUCT,
        )  # fmt: skip


@triton.jit
def _keep(partial, t1, t2, t3, HALF: tl.constexpr, REST: tl.constexpr, HB: tl.constexpr, RB: tl.constexpr):
    low, more = tl.arange(0, HB), tl.arange(0, RB)
    tl.store(partial + low, tl.sum(t1, axis=0), mask=low < HALF)
    tl.store(partial + HALF + low, tl.sum(t2, axis=0), mask=low < HALF)
    if REST:
        tl.store(partial + 2 * HALF + more, tl.sum(t3, axis=0), mask=more < REST)


@triton.jit
def backward(
    q, k, q_weight, k_weight, cos, sin, q_grad, k_grad, dq, dk, partial, q_eps, k_eps, positions, length,
    qb, qh, qs, kb, kh, ks, cb, cs, sb, ss, ub, uh, us, vb, vh, vs,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, Q_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr,
    HALF: tl.constexpr, REST: tl.constexpr, HB: tl.constexpr, RB: tl.constexpr, FACTOR: tl.constexpr,
    MIDDLE: tl.constexpr, TO_WEIGHT: tl.constexpr, POSITIONS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients of a strided set of blocks of ``POSITIONS`` positions: dq, dk ``[B, S, heads, D]``, and one
    row ``[2, D]`` of ``partial``: the contribution of these positions to the gradients of both weights.
    """
    COLUMNS: tl.constexpr = 2 * HALF + REST
    f1, f2, f3 = _factors(q_weight, HALF, REST, HB, RB, FACTOR)
    g1, g2, g3 = _factors(k_weight, HALF, REST, HB, RB, FACTOR)
    t1 = tl.zeros([Q_BLOCK, HB], tl.float32)
    t2 = tl.zeros([Q_BLOCK, HB], tl.float32)
    t3 = tl.zeros([Q_BLOCK, RB], tl.float32)
    u1 = tl.zeros([K_BLOCK, HB], tl.float32)
    u2 = tl.zeros([K_BLOCK, HB], tl.float32)
    u3 = tl.zeros([K_BLOCK, RB], tl.float32)
    blocks = tl.cdiv(positions, POSITIONS)
    for block in tl.range(tl.program_id(0), blocks, tl.num_programs(0), num_stages=STAGES):
        for number in tl.static_range(POSITIONS):
            position = block * POSITIONS + number
            inside = position < positions
            b, s = (position // length).to(tl.int64), (position % length).to(tl.int64)
            n = position.to(tl.int64)
            c1, c2, s1, s2 = _tables(cos + b * cb + s * cs, sin + b * sb + s * ss, inside, HALF, HB)
            t1, t2, t3 = _turn_back(
                q, q_grad, dq, q_eps, b * qb + s * qs, qh, b * ub + s * us, uh, n * (Q_HEADS * COLUMNS),
                inside, f1, f2, f3, c1, c2, s1, s2, t1, t2, t3,
                Q_HEADS, Q_BLOCK, HALF, REST, HB, RB, MIDDLE, TO_WEIGHT,
            )  # fmt: skip
            u1, u2, u3 = _turn_back(
                k, k_grad, dk, k_eps, b * kb + s * ks, kh, b * vb + s * vs, vh, n * (K_HEADS * COLUMNS),
                inside, g1, g2, g3, c1, c2, s1, s2, u1, u2, u3,
                K_HEADS, K_BLOCK, HALF, REST, HB, RB, MIDDLE, TO_WEIGHT,
            )  # fmt: skip
    if TO_WEIGHT:
        place = tl.program_id(0).to(tl.int64) * (2 * COLUMNS)
        _keep(partial + place, t1, t2, t3, HALF, REST, HB, RB)
        _keep(partial + place + COLUMNS, u1, u2, u3, HALF, REST, HB, RB)
