"""The device code of RMSNorm with gates and groups; `veomni_hook.kernels.rms_norm.gated` describes it.

A program processes rows of one group: columns from ``group * COLUMNS`` on; rows and strides are those of
whole tensors. Without a gate, the kernels get placeholder addresses that they do not access.
"""

import triton
import triton.language as tl

from veomni_hook.kernels.rms_norm.device import _begin, _factor

__all__ = ["backward", "forward"]

# Kinds: only groups, the weight before the norm, a gate before the norm, a gate after the norm.
GROUPED, WEIGHT_BEFORE, GATE_BEFORE, GATE_AFTER = (tl.constexpr(place) for place in range(4))


@triton.jit
def _activated(gate, sigmoid, SILU: tl.constexpr):
    if SILU:
        return gate * sigmoid
    else:
        return sigmoid


@triton.jit
def _slope(gate, sigmoid, SILU: tl.constexpr):
    if SILU:
        return sigmoid * (1.0 + gate * (1.0 - sigmoid))
    else:
        return sigmoid * (1.0 - sigmoid)


@triton.jit(do_not_specialize=["rows"])
def forward(
    x, gate, weight, y, scale, rows, n1, n2, s0, s1, s2, m1, m2, t0, t1, t2, eps,
    COLUMNS: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    FACTOR: tl.constexpr, PLACE: tl.constexpr, SILU: tl.constexpr, MIDDLE: tl.constexpr,
    INNER: tl.constexpr,
):  # fmt: skip
    """Normalise ``ROWS`` rows of a group of x into y, contiguous, and store each row's scale."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    within = tl.arange(0, BLOCK)
    column = tl.program_id(1) * COLUMNS + within
    inside = within < COLUMNS
    kept = (row < rows)[:, None] & inside[None, :]
    begin = _begin(row, n1, n2, s0, s1, s2)
    z = tl.load(x + begin[:, None] + column[None, :], mask=kept, other=0.0).to(tl.float32)
    factor = _factor(weight, column, inside, FACTOR, BLOCK)[None, :]
    if PLACE >= GATE_BEFORE:
        start = _begin(row, m1, m2, t0, t1, t2)
        gate32 = tl.load(gate + start[:, None] + column[None, :], mask=kept, other=0.0).to(tl.float32)
        activated = _activated(gate32, tl.sigmoid(gate32), SILU)
    if PLACE == GATE_BEFORE:
        z = z * activated
    if PLACE == WEIGHT_BEFORE:
        z = (z * factor).to(x.dtype.element_ty).to(tl.float32)
    s = tl.rsqrt(tl.sum(z * z, axis=1) / COLUMNS + eps)
    result = (z * s[:, None]).to(MIDDLE).to(tl.float32)
    if PLACE != WEIGHT_BEFORE:
        result = (result * factor).to(INNER).to(tl.float32)
    if PLACE == GATE_AFTER:
        result = result * activated
    target = y + row[:, None] * (GROUPS * COLUMNS) + column[None, :]
    tl.store(target, result.to(y.dtype.element_ty), mask=kept)
    tl.store(scale + row * GROUPS + tl.program_id(1), s, mask=row < rows)


@triton.jit(do_not_specialize=["rows"])
def backward(
    x, gate, weight, scale, dy, dx, dgate, partial, rows, n1, n2, s0, s1, s2, m1, m2, t0, t1, t2,
    k1, k2, u0, u1, u2,
    COLUMNS: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    FACTOR: tl.constexpr, PLACE: tl.constexpr, SILU: tl.constexpr, MIDDLE: tl.constexpr,
    INNER: tl.constexpr, TO_WEIGHT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients of a strided set of blocks of ``ROWS`` rows of a group: dx, dgate, a row of ``partial``."""
    within = tl.arange(0, BLOCK)
    column = tl.program_id(1) * COLUMNS + within
    inside = within < COLUMNS
    factor = _factor(weight, column, inside, FACTOR, BLOCK)[None, :]
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for number in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = number * ROWS + tl.arange(0, ROWS).to(tl.int64)
        kept = (row < rows)[:, None] & inside[None, :]
        begin = _begin(row, n1, n2, s0, s1, s2)
        incoming = _begin(row, k1, k2, u0, u1, u2)
        x32 = tl.load(x + begin[:, None] + column[None, :], mask=kept, other=0.0).to(tl.float32)
        dy32 = tl.load(dy + incoming[:, None] + column[None, :], mask=kept, other=0.0).to(tl.float32)
        s = tl.load(scale + row * GROUPS + tl.program_id(1), mask=row < rows, other=0.0)[:, None]
        place = row[:, None] * (GROUPS * COLUMNS) + column[None, :]
        z = x32
        if PLACE >= GATE_BEFORE:
            start = _begin(row, m1, m2, t0, t1, t2)
            gate32 = tl.load(gate + start[:, None] + column[None, :], mask=kept, other=0.0).to(tl.float32)
            sigmoid = tl.sigmoid(gate32)
            activated = _activated(gate32, sigmoid, SILU)
            slope = _slope(gate32, sigmoid, SILU)
        if PLACE == GATE_BEFORE:
            z = x32 * activated
        if PLACE == WEIGHT_BEFORE:
            z = (x32 * factor).to(x.dtype.element_ty).to(tl.float32)
        xhat = z * s
        if PLACE == GATE_AFTER:
            inner = (xhat.to(MIDDLE).to(tl.float32) * factor).to(INNER).to(tl.float32)
            tl.store(dgate + place, (dy32 * inner * slope).to(dgate.dtype.element_ty), mask=kept)
            dy32 = dy32 * activated
        if PLACE == WEIGHT_BEFORE:
            g = dy32
        else:
            g = dy32 * factor
            if TO_WEIGHT:
                total += dy32 * xhat.to(MIDDLE).to(tl.float32)
        mean = tl.sum(g * xhat, axis=1) / COLUMNS
        dz = s * (g - xhat * mean[:, None])
        if PLACE == WEIGHT_BEFORE:
            if TO_WEIGHT:
                total += dz * x32
            dz = dz * factor
        if PLACE == GATE_BEFORE:
            tl.store(dgate + place, (dz * x32 * slope).to(dgate.dtype.element_ty), mask=kept)
            dz = dz * activated
        tl.store(dx + place, dz.to(dx.dtype.element_ty), mask=kept)
    if TO_WEIGHT:
        own = tl.program_id(0).to(tl.int64) * (GROUPS * COLUMNS) + column
        tl.store(partial + own, tl.sum(total, axis=0), mask=inside)
