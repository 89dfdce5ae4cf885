"""Device code of causal convolutions of one channel at a time; `triton` beside this file launches it.

A program walks along positions with the last ones in registers, so every element is read once. It computes
four taps: a kernel with fewer has zeros in front.

Forward:  s[t] = bias + sum_j w[j] * x[t - 3 + j],  y[t] = act(s[t])
Backward: ds[t] = dy[t] * act'(s[t]),  dx[t] = sum_j w[j] * ds[t + 3 - j],
          dw[j] = sum_t ds[t] * x[t - 3 + j],  dbias = sum_t ds[t]

Positions of another sample count as zeros. Sums are float32; s is rounded to the dtype of the weight. Four
positions are loaded while the four before them are computed: a compiler does not move loads across stores.
"""

import triton
import triton.language as tl

__all__ = ["backward", "forward"]


@triton.jit
def _weight(weight, bias, channel, inside, TAPS: tl.constexpr, BIAS: tl.constexpr):
    """Four taps and the bias of channels, in float32."""
    at = weight + channel * TAPS + (TAPS - 4)
    w0 = tl.load(at + 0, mask=inside & (TAPS > 3), other=0.0).to(tl.float32)
    w1 = tl.load(at + 1, mask=inside & (TAPS > 2), other=0.0).to(tl.float32)
    w2 = tl.load(at + 2, mask=inside & (TAPS > 1), other=0.0).to(tl.float32)
    w3 = tl.load(at + 3, mask=inside, other=0.0).to(tl.float32)
    added = tl.load(bias + channel, mask=inside & BIAS, other=0.0).to(tl.float32)
    return w0, w1, w2, w3, added


@triton.jit
def _row(x, t, positions, inside, TOKEN: tl.constexpr):
    """The channels of a position, in float32; zeros outside of the row."""
    return tl.load(x + t.to(tl.int64) * TOKEN, mask=inside & (t >= 0) & (t < positions), other=0.0).to(
        tl.float32
    )


@triton.jit
def _begin(begins, t, positions, PACKED: tl.constexpr):
    """The first position of t's sample."""
    if PACKED:
        return tl.load(begins + t, mask=(t >= 0) & (t < positions), other=0)
    else:
        return 0


@triton.jit
def _of_sample(x0, x1, x2, back, PACKED: tl.constexpr):
    """The three positions before one that is so far from where its sample begins; zeros in front of that."""
    if PACKED:
        x0 = tl.where(back > 2, x0, 0.0)
        x1 = tl.where(back > 1, x1, 0.0)
        x2 = tl.where(back > 0, x2, 0.0)
    return x0, x1, x2


@triton.jit
def _rounded(s, SILU: tl.constexpr, dtype: tl.constexpr):
    return s.to(dtype).to(tl.float32) if SILU else s


@triton.jit
def _write(y, t, back, x0, x1, x2, x3, w0, w1, w2, w3, added, positions, inside, weight,
           CHANNELS: tl.constexpr, SILU: tl.constexpr, PACKED: tl.constexpr):  # fmt: skip
    x0, x1, x2 = _of_sample(x0, x1, x2, back, PACKED)
    s = _rounded(added + w0 * x0 + w1 * x1 + w2 * x2 + w3 * x3, SILU, weight.dtype.element_ty)
    if SILU:
        s = s / (1.0 + tl.exp(-s))
    tl.store(y + t.to(tl.int64) * CHANNELS, s.to(y.dtype.element_ty), mask=inside & (t < positions))


@triton.jit(do_not_specialize=["positions"])
def forward(
    x,  # [rows, positions, CHANNELS], with strides ROW and TOKEN
    weight,  # [CHANNELS, TAPS]
    bias,  # [CHANNELS], read if BIAS
    begins,  # [rows, positions], int32: read if PACKED
    y,  # [rows, positions, CHANNELS], the dtype of x: a result
    positions,
    CHANNELS: tl.constexpr,
    ROW: tl.constexpr,
    TOKEN: tl.constexpr,
    TAPS: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    PACKED: tl.constexpr,
    RUN: tl.constexpr,  # positions of a program, a multiple of 4
    BLOCK: tl.constexpr,  # channels of a program
):
    """Grid: cdiv(CHANNELS, BLOCK), cdiv(positions, RUN), rows."""
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < CHANNELS
    row = tl.program_id(2).to(tl.int64)
    start = tl.program_id(1) * RUN
    x += row * ROW + channel
    y += row * positions * CHANNELS + channel
    begins += row * positions
    w0, w1, w2, w3, added = _weight(weight, bias, channel, inside, TAPS, BIAS)
    x0 = _row(x, start - 3, positions, inside, TOKEN)
    x1 = _row(x, start - 2, positions, inside, TOKEN)
    x2 = _row(x, start - 1, positions, inside, TOKEN)
    x3 = _row(x, start, positions, inside, TOKEN)
    x4 = _row(x, start + 1, positions, inside, TOKEN)
    x5 = _row(x, start + 2, positions, inside, TOKEN)
    x6 = _row(x, start + 3, positions, inside, TOKEN)
    for step in range(0, RUN, 4):
        t = start + step
        n3 = _row(x, t + 4, positions, inside, TOKEN)
        n4 = _row(x, t + 5, positions, inside, TOKEN)
        n5 = _row(x, t + 6, positions, inside, TOKEN)
        n6 = _row(x, t + 7, positions, inside, TOKEN)
        b0 = t - _begin(begins, t, positions, PACKED)
        b1 = t + 1 - _begin(begins, t + 1, positions, PACKED)
        b2 = t + 2 - _begin(begins, t + 2, positions, PACKED)
        b3 = t + 3 - _begin(begins, t + 3, positions, PACKED)
        _write(
            y, t, b0, x0, x1, x2, x3, w0, w1, w2, w3, added, positions, inside, weight, CHANNELS, SILU, PACKED
        )
        _write(
            y,
            t + 1,
            b1,
            x1,
            x2,
            x3,
            x4,
            w0,
            w1,
            w2,
            w3,
            added,
            positions,
            inside,
            weight,
            CHANNELS,
            SILU,
            PACKED,
        )
        _write(
            y,
            t + 2,
            b2,
            x2,
            x3,
            x4,
            x5,
            w0,
            w1,
            w2,
            w3,
            added,
            positions,
            inside,
            weight,
            CHANNELS,
            SILU,
            PACKED,
        )
        _write(
            y,
            t + 3,
            b3,
            x3,
            x4,
            x5,
            x6,
            w0,
            w1,
            w2,
            w3,
            added,
            positions,
            inside,
            weight,
            CHANNELS,
            SILU,
            PACKED,
        )
        x0, x1, x2, x3, x4, x5, x6 = x4, x5, x6, n3, n4, n5, n6


@triton.jit
def _slope(dy, back, x0, x1, x2, x3, w0, w1, w2, w3, added, weight, SILU: tl.constexpr, PACKED: tl.constexpr):
    """dy times the derivative of the activation, and what is in front of the position in its sample."""
    x0, x1, x2 = _of_sample(x0, x1, x2, back, PACKED)
    if SILU:
        s = _rounded(added + w0 * x0 + w1 * x1 + w2 * x2 + w3 * x3, SILU, weight.dtype.element_ty)
        gate = 1.0 / (1.0 + tl.exp(-s))
        dy *= gate * (1.0 + s * (1.0 - gate))
    return dy, x0, x1, x2


@triton.jit
def _write_dx(dx, t, d0, d1, d2, d3, f1, f2, f3, w0, w1, w2, w3, positions, inside,
              CHANNELS: tl.constexpr, PACKED: tl.constexpr):  # fmt: skip
    """From ds of t to t + 3, and how far the last three of these are from where their sample begins."""
    if PACKED:
        # t is read by the positions behind it as far as their sample reaches back.
        d1 = tl.where(f1 > 0, d1, 0.0)
        d2 = tl.where(f2 > 1, d2, 0.0)
        d3 = tl.where(f3 > 2, d3, 0.0)
    total = w3 * d0 + w2 * d1 + w1 * d2 + w0 * d3
    tl.store(dx + t.to(tl.int64) * CHANNELS, total.to(dx.dtype.element_ty), mask=inside & (t < positions))


@triton.jit(do_not_specialize=["positions"])
def backward(  # noqa: PLR0915 - four positions, written out
    x,  # as in `forward`
    weight,
    bias,
    begins,
    dy,  # [rows, positions, CHANNELS], with strides DROW and DTOKEN
    dx,  # [rows, positions, CHANNELS], the dtype of x: a result
    sums,  # [rows * cdiv(positions, RUN), 5, CHANNELS], float32: of four taps and the bias, a result
    positions,
    CHANNELS: tl.constexpr,
    ROW: tl.constexpr,
    TOKEN: tl.constexpr,
    DROW: tl.constexpr,
    DTOKEN: tl.constexpr,
    TAPS: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    PACKED: tl.constexpr,
    RUN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Four positions at a time, from the last; first ds of three behind the run. Grid: as `forward`."""
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < CHANNELS
    row = tl.program_id(2).to(tl.int64)
    start = tl.program_id(1) * RUN
    x += row * ROW + channel
    dy += row * DROW + channel
    dx += row * positions * CHANNELS + channel
    begins += row * positions
    w0, w1, w2, w3, added = _weight(weight, bias, channel, inside, TAPS, BIAS)
    zero = tl.zeros((BLOCK,), tl.float32)
    s0, s1, s2, s3, s4 = zero, zero, zero, zero, zero
    # Of the positions t to t + 3 that come next: x of t - 3 to t + 3, and dy. The first are behind the run.
    t = start + RUN
    x0, x1, x2 = (
        _row(x, t - 3, positions, inside, TOKEN),
        _row(x, t - 2, positions, inside, TOKEN),
        _row(x, t - 1, positions, inside, TOKEN),
    )
    x3, x4 = _row(x, t, positions, inside, TOKEN), _row(x, t + 1, positions, inside, TOKEN)
    x5 = _row(x, t + 2, positions, inside, TOKEN)
    g0, g1 = _row(dy, t, positions, inside, DTOKEN), _row(dy, t + 1, positions, inside, DTOKEN)
    g2 = _row(dy, t + 2, positions, inside, DTOKEN)
    f0, f1 = t - _begin(begins, t, positions, PACKED), t + 1 - _begin(begins, t + 1, positions, PACKED)
    f2 = t + 2 - _begin(begins, t + 2, positions, PACKED)
    d2, _, _, _ = _slope(g2, f2, x2, x3, x4, x5, w0, w1, w2, w3, added, weight, SILU, PACKED)
    d1, _, _, _ = _slope(g1, f1, x1, x2, x3, x4, w0, w1, w2, w3, added, weight, SILU, PACKED)
    d0, _, _, _ = _slope(g0, f0, x0, x1, x2, x3, w0, w1, w2, w3, added, weight, SILU, PACKED)
    # ds of what is behind, e0 to e2, and how far it is from where its sample begins.
    e0, e1, e2, b0, b1, b2 = d0, d1, d2, f0, f1, f2
    t = start + RUN - 4
    x6, x5, x4 = x2, x1, x0
    x3 = _row(x, t, positions, inside, TOKEN)
    x2 = _row(x, t - 1, positions, inside, TOKEN)
    x1 = _row(x, t - 2, positions, inside, TOKEN)
    x0 = _row(x, t - 3, positions, inside, TOKEN)
    g3 = _row(dy, t + 3, positions, inside, DTOKEN)
    g2 = _row(dy, t + 2, positions, inside, DTOKEN)
    g1 = _row(dy, t + 1, positions, inside, DTOKEN)
    g0 = _row(dy, t, positions, inside, DTOKEN)
    for step in range(0, RUN, 4):
        t = start + RUN - 4 - step
        n3 = _row(x, t - 4, positions, inside, TOKEN)
        n2 = _row(x, t - 5, positions, inside, TOKEN)
        n1 = _row(x, t - 6, positions, inside, TOKEN)
        n0 = _row(x, t - 7, positions, inside, TOKEN)
        h3 = _row(dy, t - 1, positions, inside, DTOKEN)
        h2 = _row(dy, t - 2, positions, inside, DTOKEN)
        h1 = _row(dy, t - 3, positions, inside, DTOKEN)
        h0 = _row(dy, t - 4, positions, inside, DTOKEN)
        f3 = t + 3 - _begin(begins, t + 3, positions, PACKED)
        f2 = t + 2 - _begin(begins, t + 2, positions, PACKED)
        f1 = t + 1 - _begin(begins, t + 1, positions, PACKED)
        f0 = t - _begin(begins, t, positions, PACKED)
        d3, a0, a1, a2 = _slope(g3, f3, x3, x4, x5, x6, w0, w1, w2, w3, added, weight, SILU, PACKED)
        s0, s1, s2, s3, s4 = s0 + d3 * a0, s1 + d3 * a1, s2 + d3 * a2, s3 + d3 * x6, s4 + d3
        d2, a0, a1, a2 = _slope(g2, f2, x2, x3, x4, x5, w0, w1, w2, w3, added, weight, SILU, PACKED)
        s0, s1, s2, s3, s4 = s0 + d2 * a0, s1 + d2 * a1, s2 + d2 * a2, s3 + d2 * x5, s4 + d2
        d1, a0, a1, a2 = _slope(g1, f1, x1, x2, x3, x4, w0, w1, w2, w3, added, weight, SILU, PACKED)
        s0, s1, s2, s3, s4 = s0 + d1 * a0, s1 + d1 * a1, s2 + d1 * a2, s3 + d1 * x4, s4 + d1
        d0, a0, a1, a2 = _slope(g0, f0, x0, x1, x2, x3, w0, w1, w2, w3, added, weight, SILU, PACKED)
        s0, s1, s2, s3, s4 = s0 + d0 * a0, s1 + d0 * a1, s2 + d0 * a2, s3 + d0 * x3, s4 + d0
        _write_dx(dx, t + 3, d3, e0, e1, e2, b0, b1, b2, w0, w1, w2, w3, positions, inside, CHANNELS, PACKED)
        _write_dx(dx, t + 2, d2, d3, e0, e1, f3, b0, b1, w0, w1, w2, w3, positions, inside, CHANNELS, PACKED)
        _write_dx(dx, t + 1, d1, d2, d3, e0, f2, f3, b0, w0, w1, w2, w3, positions, inside, CHANNELS, PACKED)
        _write_dx(dx, t, d0, d1, d2, d3, f1, f2, f3, w0, w1, w2, w3, positions, inside, CHANNELS, PACKED)
        e0, e1, e2, b0, b1, b2 = d0, d1, d2, f0, f1, f2
        x4, x5, x6 = x0, x1, x2
        x0, x1, x2, x3 = n0, n1, n2, n3
        g0, g1, g2, g3 = h0, h1, h2, h3
    at = sums + (row * tl.num_programs(1) + tl.program_id(1)) * 5 * CHANNELS + channel
    tl.store(at, s0, mask=inside)
    tl.store(at + CHANNELS, s1, mask=inside)
    tl.store(at + 2 * CHANNELS, s2, mask=inside)
    tl.store(at + 3 * CHANNELS, s3, mask=inside)
    tl.store(at + 4 * CHANNELS, s4, mask=inside)
