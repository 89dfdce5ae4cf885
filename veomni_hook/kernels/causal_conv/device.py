"""Device code of causal convolutions of one channel at a time; `triton` beside this file launches it.

A program walks along positions with the last ones in registers, so every element is read once. It computes
four taps: a kernel with fewer has zeros in front.

Forward:  s[t] = bias + sum_j w[j] * x[t - 3 + j],  y[t] = act(s[t])
Backward: ds[t] = dy[t] * act'(s[t]),  dx[t] = sum_j w[j] * ds[t + 3 - j],
          dw[j] = sum_t ds[t] * x[t - 3 + j],  dbias = sum_t ds[t]

Positions of another sample count as zeros. Sums are float32; s is rounded to the dtype of the weight. Four
positions are loaded while the four before them are computed: a compiler does not move loads across stores.
Runs that lie inside of one sample, as most do, have code without masks (MASKED, PACKED): arithmetic bounds
the backward, and masks are a third of it.
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
def _row(x, t, AHEAD: tl.constexpr, positions, inside, TOKEN: tl.constexpr, MASKED: tl.constexpr):
    """The channels of position t + AHEAD, in float32; if MASKED, zeros outside of the row."""
    at = x + t.to(tl.int64) * TOKEN + AHEAD * TOKEN
    if MASKED:
        exists = (t + AHEAD >= 0) & (t + AHEAD < positions)
        return tl.load(at, mask=inside & exists, other=0.0).to(tl.float32)
    else:
        return tl.load(at).to(tl.float32)


@triton.jit
def _back(begins, t, positions, PACKED: tl.constexpr):
    """How far position t is from where its sample begins."""
    if PACKED:
        return t - tl.load(begins + t, mask=(t >= 0) & (t < positions), other=0)
    else:
        return t


@triton.jit
def _of_one_sample(begins, start, end, positions, block, CHANNELS: tl.constexpr, BLOCK: tl.constexpr,
                   PACKED: tl.constexpr):  # fmt: skip
    """Whether all channels exist, and positions from start - 8 to end + 8 do, those read in one sample."""
    whole = (start >= 8) & (end + 8 <= positions) & (block * BLOCK + BLOCK <= CHANNELS)
    if PACKED:
        whole = whole & (_back(begins, end + 2, positions, PACKED) >= end + 2 - (start - 3))
    return whole


@triton.jit
def _of_sample(x0, x1, x2, back, PACKED: tl.constexpr):
    """The three positions before one that is so far from where its sample begins; zeros in front of that."""
    if PACKED:
        x0 = tl.where(back > 2, x0, 0.0)
        x1 = tl.where(back > 1, x1, 0.0)
        x2 = tl.where(back > 0, x2, 0.0)
    return x0, x1, x2


@triton.jit
def _sum(x0, x1, x2, x3, taps, dtype: tl.constexpr, SILU: tl.constexpr):
    s = taps[4] + taps[0] * x0 + taps[1] * x1 + taps[2] * x2 + taps[3] * x3
    return s.to(dtype).to(tl.float32) if SILU else s


@triton.jit
def _sigmoid(s):
    # Two approximations of the hardware. A division takes twice the instructions.
    root = tl.rsqrt(1.0 + tl.exp(-s))
    return root * root


@triton.jit
def _write(y, t, AHEAD: tl.constexpr, value, positions, inside, TOKEN: tl.constexpr, MASKED: tl.constexpr):
    at = y + t.to(tl.int64) * TOKEN + AHEAD * TOKEN
    if MASKED:
        tl.store(at, value.to(y.dtype.element_ty), mask=inside & (t + AHEAD < positions))
    else:
        tl.store(at, value.to(y.dtype.element_ty))


@triton.jit
def _output(x0, x1, x2, x3, back, taps, dtype: tl.constexpr, SILU: tl.constexpr, PACKED: tl.constexpr):
    x0, x1, x2 = _of_sample(x0, x1, x2, back, PACKED)
    s = _sum(x0, x1, x2, x3, taps, dtype, SILU)
    return s * _sigmoid(s) if SILU else s


@triton.jit
def _forward(x, y, begins, start, taps, positions, inside, dtype: tl.constexpr, CHANNELS: tl.constexpr,
             TOKEN: tl.constexpr, SILU: tl.constexpr, PACKED: tl.constexpr, RUN: tl.constexpr,
             MASKED: tl.constexpr):  # fmt: skip
    """A run of positions, four at a time."""
    x0 = _row(x, start, -3, positions, inside, TOKEN, MASKED)
    x1 = _row(x, start, -2, positions, inside, TOKEN, MASKED)
    x2 = _row(x, start, -1, positions, inside, TOKEN, MASKED)
    x3 = _row(x, start, 0, positions, inside, TOKEN, MASKED)
    x4 = _row(x, start, 1, positions, inside, TOKEN, MASKED)
    x5 = _row(x, start, 2, positions, inside, TOKEN, MASKED)
    x6 = _row(x, start, 3, positions, inside, TOKEN, MASKED)
    for step in range(0, RUN, 4):
        t = start + step
        n3 = _row(x, t, 4, positions, inside, TOKEN, MASKED)
        n4 = _row(x, t, 5, positions, inside, TOKEN, MASKED)
        n5 = _row(x, t, 6, positions, inside, TOKEN, MASKED)
        n6 = _row(x, t, 7, positions, inside, TOKEN, MASKED)
        y0 = _output(x0, x1, x2, x3, _back(begins, t, positions, PACKED), taps, dtype, SILU, PACKED)
        y1 = _output(x1, x2, x3, x4, _back(begins, t + 1, positions, PACKED), taps, dtype, SILU, PACKED)
        y2 = _output(x2, x3, x4, x5, _back(begins, t + 2, positions, PACKED), taps, dtype, SILU, PACKED)
        y3 = _output(x3, x4, x5, x6, _back(begins, t + 3, positions, PACKED), taps, dtype, SILU, PACKED)
        _write(y, t, 0, y0, positions, inside, CHANNELS, MASKED)
        _write(y, t, 1, y1, positions, inside, CHANNELS, MASKED)
        _write(y, t, 2, y2, positions, inside, CHANNELS, MASKED)
        _write(y, t, 3, y3, positions, inside, CHANNELS, MASKED)
        x0, x1, x2, x3, x4, x5, x6 = x4, x5, x6, n3, n4, n5, n6


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
    block = tl.program_id(0)
    channel = block * BLOCK + tl.arange(0, BLOCK)
    inside = channel < CHANNELS
    row = tl.program_id(2).to(tl.int64)
    start = tl.program_id(1) * RUN
    x += row * ROW + channel
    y += row * positions * CHANNELS + channel
    begins += row * positions
    dtype: tl.constexpr = weight.dtype.element_ty
    taps = _weight(weight, bias, channel, inside, TAPS, BIAS)
    if _of_one_sample(begins, start, start + RUN, positions, block, CHANNELS, BLOCK, PACKED):
        _forward(
            x, y, begins, start, taps, positions, inside, dtype, CHANNELS, TOKEN, SILU, False, RUN, False
        )
    else:
        _forward(
            x, y, begins, start, taps, positions, inside, dtype, CHANNELS, TOKEN, SILU, PACKED, RUN, True
        )


@triton.jit
def _slope(dy, x0, x1, x2, x3, back, taps, dtype: tl.constexpr, SILU: tl.constexpr, PACKED: tl.constexpr):
    """dy times the derivative of the activation, and what is in front of the position in its sample."""
    x0, x1, x2 = _of_sample(x0, x1, x2, back, PACKED)
    if SILU:
        s = _sum(x0, x1, x2, x3, taps, dtype, SILU)
        gate = _sigmoid(s)
        dy *= gate * (1.0 + s * (1.0 - gate))
    return dy, x0, x1, x2


@triton.jit
def _dx(d0, d1, d2, d3, f1, f2, f3, taps, PACKED: tl.constexpr):
    """From ds of t to t + 3, and how far the last three of these are from where their sample begins."""
    if PACKED:
        # t is read by the positions behind it as far as their sample reaches back.
        d1 = tl.where(f1 > 0, d1, 0.0)
        d2 = tl.where(f2 > 1, d2, 0.0)
        d3 = tl.where(f3 > 2, d3, 0.0)
    return taps[3] * d0 + taps[2] * d1 + taps[1] * d2 + taps[0] * d3


@triton.jit
def _backward(  # noqa: PLR0915 - four positions, written out
    x, dy, dx, begins, start, taps, positions, inside, zero, dtype: tl.constexpr, CHANNELS: tl.constexpr,
    TOKEN: tl.constexpr, DTOKEN: tl.constexpr, SILU: tl.constexpr, PACKED: tl.constexpr, RUN: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Four positions at a time, from the last; first ds of three behind the run. Return the sums."""
    s0, s1, s2, s3, s4 = zero, zero, zero, zero, zero
    # Of the positions t to t + 3 that come next: x of t - 3 to t + 3, and dy. The first are behind the run.
    t = start + RUN
    x0 = _row(x, t, -3, positions, inside, TOKEN, MASKED)
    x1 = _row(x, t, -2, positions, inside, TOKEN, MASKED)
    x2 = _row(x, t, -1, positions, inside, TOKEN, MASKED)
    x3 = _row(x, t, 0, positions, inside, TOKEN, MASKED)
    x4 = _row(x, t, 1, positions, inside, TOKEN, MASKED)
    x5 = _row(x, t, 2, positions, inside, TOKEN, MASKED)
    g0 = _row(dy, t, 0, positions, inside, DTOKEN, MASKED)
    g1 = _row(dy, t, 1, positions, inside, DTOKEN, MASKED)
    g2 = _row(dy, t, 2, positions, inside, DTOKEN, MASKED)
    # How far they are from where their sample begins.
    b0 = _back(begins, t, positions, PACKED)
    b1 = _back(begins, t + 1, positions, PACKED)
    b2 = _back(begins, t + 2, positions, PACKED)
    e2, _, _, _ = _slope(g2, x2, x3, x4, x5, b2, taps, dtype, SILU, PACKED)
    e1, _, _, _ = _slope(g1, x1, x2, x3, x4, b1, taps, dtype, SILU, PACKED)
    e0, _, _, _ = _slope(g0, x0, x1, x2, x3, b0, taps, dtype, SILU, PACKED)
    t = start + RUN - 4
    x6, x5, x4 = x2, x1, x0
    x3 = _row(x, t, 0, positions, inside, TOKEN, MASKED)
    x2 = _row(x, t, -1, positions, inside, TOKEN, MASKED)
    x1 = _row(x, t, -2, positions, inside, TOKEN, MASKED)
    x0 = _row(x, t, -3, positions, inside, TOKEN, MASKED)
    g3 = _row(dy, t, 3, positions, inside, DTOKEN, MASKED)
    g2 = _row(dy, t, 2, positions, inside, DTOKEN, MASKED)
    g1 = _row(dy, t, 1, positions, inside, DTOKEN, MASKED)
    g0 = _row(dy, t, 0, positions, inside, DTOKEN, MASKED)
    for step in range(0, RUN, 4):
        t = start + RUN - 4 - step
        n3 = _row(x, t, -4, positions, inside, TOKEN, MASKED)
        n2 = _row(x, t, -5, positions, inside, TOKEN, MASKED)
        n1 = _row(x, t, -6, positions, inside, TOKEN, MASKED)
        n0 = _row(x, t, -7, positions, inside, TOKEN, MASKED)
        h3 = _row(dy, t, -1, positions, inside, DTOKEN, MASKED)
        h2 = _row(dy, t, -2, positions, inside, DTOKEN, MASKED)
        h1 = _row(dy, t, -3, positions, inside, DTOKEN, MASKED)
        h0 = _row(dy, t, -4, positions, inside, DTOKEN, MASKED)
        f3 = _back(begins, t + 3, positions, PACKED)
        f2 = _back(begins, t + 2, positions, PACKED)
        f1 = _back(begins, t + 1, positions, PACKED)
        f0 = _back(begins, t, positions, PACKED)
        d3, a0, a1, a2 = _slope(g3, x3, x4, x5, x6, f3, taps, dtype, SILU, PACKED)
        s0, s1, s2, s3, s4 = s0 + d3 * a0, s1 + d3 * a1, s2 + d3 * a2, s3 + d3 * x6, s4 + d3
        d2, a0, a1, a2 = _slope(g2, x2, x3, x4, x5, f2, taps, dtype, SILU, PACKED)
        s0, s1, s2, s3, s4 = s0 + d2 * a0, s1 + d2 * a1, s2 + d2 * a2, s3 + d2 * x5, s4 + d2
        d1, a0, a1, a2 = _slope(g1, x1, x2, x3, x4, f1, taps, dtype, SILU, PACKED)
        s0, s1, s2, s3, s4 = s0 + d1 * a0, s1 + d1 * a1, s2 + d1 * a2, s3 + d1 * x4, s4 + d1
        d0, a0, a1, a2 = _slope(g0, x0, x1, x2, x3, f0, taps, dtype, SILU, PACKED)
        s0, s1, s2, s3, s4 = s0 + d0 * a0, s1 + d0 * a1, s2 + d0 * a2, s3 + d0 * x3, s4 + d0
        _write(dx, t, 3, _dx(d3, e0, e1, e2, b0, b1, b2, taps, PACKED), positions, inside, CHANNELS, MASKED)
        _write(dx, t, 2, _dx(d2, d3, e0, e1, f3, b0, b1, taps, PACKED), positions, inside, CHANNELS, MASKED)
        _write(dx, t, 1, _dx(d1, d2, d3, e0, f2, f3, b0, taps, PACKED), positions, inside, CHANNELS, MASKED)
        _write(dx, t, 0, _dx(d0, d1, d2, d3, f1, f2, f3, taps, PACKED), positions, inside, CHANNELS, MASKED)
        e0, e1, e2, b0, b1, b2 = d0, d1, d2, f0, f1, f2
        x4, x5, x6 = x0, x1, x2
        x0, x1, x2, x3 = n0, n1, n2, n3
        g0, g1, g2, g3 = h0, h1, h2, h3
    return s0, s1, s2, s3, s4


@triton.jit(do_not_specialize=["positions"])
def backward(
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
    """Grid: as `forward`."""
    block = tl.program_id(0)
    channel = block * BLOCK + tl.arange(0, BLOCK)
    inside = channel < CHANNELS
    row = tl.program_id(2).to(tl.int64)
    start = tl.program_id(1) * RUN
    x += row * ROW + channel
    dy += row * DROW + channel
    dx += row * positions * CHANNELS + channel
    begins += row * positions
    dtype: tl.constexpr = weight.dtype.element_ty
    taps = _weight(weight, bias, channel, inside, TAPS, BIAS)
    zero = tl.zeros((BLOCK,), tl.float32)
    if _of_one_sample(begins, start, start + RUN, positions, block, CHANNELS, BLOCK, PACKED):
        s0, s1, s2, s3, s4 = _backward(
            x, dy, dx, begins, start, taps, positions, inside, zero,
            dtype, CHANNELS, TOKEN, DTOKEN, SILU, False, RUN, False,
        )  # fmt: skip
    else:
        s0, s1, s2, s3, s4 = _backward(
            x, dy, dx, begins, start, taps, positions, inside, zero,
            dtype, CHANNELS, TOKEN, DTOKEN, SILU, PACKED, RUN, True,
        )  # fmt: skip
    at = sums + (row * tl.num_programs(1) + tl.program_id(1)) * 5 * CHANNELS + channel
    tl.store(at, s0, mask=inside)
    tl.store(at + CHANNELS, s1, mask=inside)
    tl.store(at + 2 * CHANNELS, s2, mask=inside)
    tl.store(at + 3 * CHANNELS, s3, mask=inside)
    tl.store(at + 4 * CHANNELS, s4, mask=inside)
