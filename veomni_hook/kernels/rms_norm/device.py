"""The device code of RMSNorm; `veomni_hook.kernels.rms_norm.triton` describes and launches it."""

import triton
import triton.language as tl

__all__ = ["add_up", "backward", "forward"]


@triton.jit
def _begin(row, n1, n2, s0, s1, s2):
    inner = row // n2
    return inner // n1 * s0 + inner % n1 * s1 + row % n2 * s2


@triton.jit
def _factor(weight, column, inside, FACTOR: tl.constexpr, BLOCK: tl.constexpr):
    if FACTOR == 0:
        factor = tl.full([BLOCK], 1.0, tl.float32)
    else:
        held = tl.load(weight + column, mask=inside, other=0.0)
        factor = held.to(tl.float32)
        if FACTOR == 2:
            factor = 1.0 + factor
        if FACTOR == 3:
            factor = (1.0 + factor).to(held.dtype).to(tl.float32)
    return factor


@triton.jit(do_not_specialize=["rows"])
def forward(
    x, weight, y, scale, rows, n1, n2, s0, s1, s2, eps,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, FACTOR: tl.constexpr,
    MIDDLE: tl.constexpr,
):  # fmt: skip
    """Normalise ``ROWS`` rows of x into y, contiguous, and keep each row's scale."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < COLUMNS
    kept = (row < rows)[:, None] & inside[None, :]
    begin = _begin(row, n1, n2, s0, s1, s2)
    x32 = tl.load(x + begin[:, None] + column[None, :], mask=kept, other=0.0).to(tl.float32)
    factor = _factor(weight, column, inside, FACTOR, BLOCK)
    s = tl.rsqrt(tl.sum(x32 * x32, axis=1) / COLUMNS + eps)
    result = (x32 * s[:, None]).to(MIDDLE).to(tl.float32) * factor[None, :]
    tl.store(y + row[:, None] * COLUMNS + column[None, :], result.to(y.dtype.element_ty), mask=kept)
    tl.store(scale + row, s, mask=row < rows)


@triton.jit(do_not_specialize=["rows"])
def backward(  # noqa: PLR0912, PLR0915 - Triton has no list that could hold the blocks of a row
    x, weight, scale, dy, direct, dx, partial, rows,
    n1, n2, s0, s1, s2, m1, m2, t0, t1, t2, o1, o2, u0, u1, u2,
    COLUMNS: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr, ROWS: tl.constexpr,
    FACTOR: tl.constexpr, MIDDLE: tl.constexpr, ADDED: tl.constexpr, TO_WEIGHT: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients of a strided set of blocks of ``ROWS`` rows: dx, and one row of ``partial``.

    Strides are those of x, of dy and of ``direct``, another gradient of x that is added to dx if ``ADDED``.
    A row is held in ``HEAD`` columns plus ``TAIL`` columns (which may be 0), both powers of two.
    """
    column = tl.arange(0, HEAD)
    inside = column < COLUMNS
    factor = _factor(weight, column, inside, FACTOR, HEAD)
    total = tl.zeros([ROWS, HEAD], tl.float32)
    if TAIL:
        further = HEAD + tl.arange(0, TAIL)
        within = further < COLUMNS
        factor_of_tail = _factor(weight, further, within, FACTOR, TAIL)
        total_of_tail = tl.zeros([ROWS, TAIL], tl.float32)
    for number in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = number * ROWS + tl.arange(0, ROWS).to(tl.int64)
        there = (row < rows)[:, None]
        kept = there & inside[None, :]
        begin = _begin(row, n1, n2, s0, s1, s2)[:, None]
        incoming = _begin(row, m1, m2, t0, t1, t2)[:, None]
        target = dx + row[:, None] * COLUMNS
        x32 = tl.load(x + begin + column[None, :], mask=kept, other=0.0).to(tl.float32)
        dy32 = tl.load(dy + incoming + column[None, :], mask=kept, other=0.0).to(tl.float32)
        if ADDED:
            beside = direct + _begin(row, o1, o2, u0, u1, u2)[:, None]
            held = tl.load(beside + column[None, :], mask=kept, other=0.0)
        if TAIL:
            left = there & within[None, :]
            x_of_tail = tl.load(x + begin + further[None, :], mask=left, other=0.0).to(tl.float32)
            dy_of_tail = tl.load(dy + incoming + further[None, :], mask=left, other=0.0).to(tl.float32)
            if ADDED:
                held_of_tail = tl.load(beside + further[None, :], mask=left, other=0.0)
        s = tl.load(scale + row, mask=row < rows, other=0.0)
        xhat = x32 * s[:, None]
        g = dy32 * factor[None, :]
        product = tl.sum(g * xhat, axis=1)
        if TAIL:
            xhat_of_tail = x_of_tail * s[:, None]
            g_of_tail = dy_of_tail * factor_of_tail[None, :]
            product += tl.sum(g_of_tail * xhat_of_tail, axis=1)
        mean = product / COLUMNS
        result = s[:, None] * (g - xhat * mean[:, None])
        if ADDED:
            result += held.to(tl.float32)
        tl.store(target + column[None, :], result.to(dx.dtype.element_ty), mask=kept)
        if TAIL:
            result_of_tail = s[:, None] * (g_of_tail - xhat_of_tail * mean[:, None])
            if ADDED:
                result_of_tail += held_of_tail.to(tl.float32)
            tl.store(target + further[None, :], result_of_tail.to(dx.dtype.element_ty), mask=left)
        if TO_WEIGHT:
            total += dy32 * xhat.to(MIDDLE).to(tl.float32)
            if TAIL:
                total_of_tail += dy_of_tail * xhat_of_tail.to(MIDDLE).to(tl.float32)
    if TO_WEIGHT:
        own = partial + tl.program_id(0).to(tl.int64) * COLUMNS
        tl.store(own + column, tl.sum(total, axis=0), mask=inside)
        if TAIL:
            tl.store(own + further, tl.sum(total_of_tail, axis=0), mask=within)


@triton.jit(do_not_specialize=["count"])
def add_up(
    partial, total, count, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Sum the ``count`` rows of ``partial`` in float32, ``BLOCK`` columns per program, in a fixed order."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < COLUMNS
    part = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in range(0, count, ROWS):
        row = first + tl.arange(0, ROWS)
        place = row[:, None] * COLUMNS + column[None, :]
        part += tl.load(partial + place, mask=(row < count)[:, None] & inside[None, :], other=0.0)
    tl.store(total + column, tl.sum(part, axis=0).to(total.dtype.element_ty), mask=inside)
