"""The device code of an addition and RMSNorm; `veomni_hook.kernels.add_rms_norm.triton` launches it."""

import triton
import triton.language as tl

from veomni_hook.kernels.rms_norm.device import _begin, _factor

__all__ = ["backward", "forward"]


@triton.jit(do_not_specialize=["rows"])
def forward(
    residual, hidden, weight, total, y, scale, rows, n1, n2, s0, s1, s2, m1, m2, t0, t1, t2, eps,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, FACTOR: tl.constexpr,
    MIDDLE: tl.constexpr,
):  # fmt: skip
    """Add ``ROWS`` rows into total, normalise them into y, both contiguous, and keep each row's scale."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < COLUMNS
    kept = (row < rows)[:, None] & inside[None, :]
    begin = _begin(row, n1, n2, s0, s1, s2)
    start = _begin(row, m1, m2, t0, t1, t2)
    a = tl.load(residual + begin[:, None] + column[None, :], mask=kept, other=0.0).to(tl.float32)
    b = tl.load(hidden + start[:, None] + column[None, :], mask=kept, other=0.0).to(tl.float32)
    place = row[:, None] * COLUMNS + column[None, :]
    added = (a + b).to(total.dtype.element_ty)
    tl.store(total + place, added, mask=kept)
    x32 = added.to(tl.float32)
    factor = _factor(weight, column, inside, FACTOR, BLOCK)
    s = tl.rsqrt(tl.sum(x32 * x32, axis=1) / COLUMNS + eps)
    result = (x32 * s[:, None]).to(MIDDLE).to(tl.float32) * factor[None, :]
    tl.store(y + place, result.to(y.dtype.element_ty), mask=kept)
    tl.store(scale + row, s, mask=row < rows)


@triton.jit(do_not_specialize=["rows"])
def backward(
    x, weight, scale, dy, dtotal, dx, partial, rows, n1, n2, s0, s1, s2, m1, m2, t0, t1, t2,
    COLUMNS: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr, ROWS: tl.constexpr,
    FACTOR: tl.constexpr, MIDDLE: tl.constexpr, TO_WEIGHT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients of blocks of ``ROWS`` rows, every so many of them: dx, and one row of ``partial``.

    x is contiguous; the first strides are those of dy, the second those of dtotal. A row stands in ``HEAD``
    columns and, unless that is 0, ``TAIL`` further ones, powers of two.
    """
    column = tl.arange(0, HEAD)
    inside = column < COLUMNS
    factor = _factor(weight, column, inside, FACTOR, HEAD)
    sums = tl.zeros([ROWS, HEAD], tl.float32)
    if TAIL:
        further = HEAD + tl.arange(0, TAIL)
        within = further < COLUMNS
        factor_of_tail = _factor(weight, further, within, FACTOR, TAIL)
        sums_of_tail = tl.zeros([ROWS, TAIL], tl.float32)
    for number in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = number * ROWS + tl.arange(0, ROWS).to(tl.int64)
        there = (row < rows)[:, None]
        kept = there & inside[None, :]
        place = row[:, None] * COLUMNS
        incoming = _begin(row, n1, n2, s0, s1, s2)[:, None]
        beside = _begin(row, m1, m2, t0, t1, t2)[:, None]
        x32 = tl.load(x + place + column[None, :], mask=kept, other=0.0).to(tl.float32)
        dy32 = tl.load(dy + incoming + column[None, :], mask=kept, other=0.0).to(tl.float32)
        direct = tl.load(dtotal + beside + column[None, :], mask=kept, other=0.0)
        if TAIL:
            left = there & within[None, :]
            x_of_tail = tl.load(x + place + further[None, :], mask=left, other=0.0).to(tl.float32)
            dy_of_tail = tl.load(dy + incoming + further[None, :], mask=left, other=0.0).to(tl.float32)
            direct_of_tail = tl.load(dtotal + beside + further[None, :], mask=left, other=0.0)
        s = tl.load(scale + row, mask=row < rows, other=0.0)
        xhat = x32 * s[:, None]
        g = dy32 * factor[None, :]
        product = tl.sum(g * xhat, axis=1)
        if TAIL:
            xhat_of_tail = x_of_tail * s[:, None]
            g_of_tail = dy_of_tail * factor_of_tail[None, :]
            product += tl.sum(g_of_tail * xhat_of_tail, axis=1)
        mean = product / COLUMNS
        result = s[:, None] * (g - xhat * mean[:, None]) + direct.to(tl.float32)
        tl.store(dx + place + column[None, :], result.to(dx.dtype.element_ty), mask=kept)
        if TAIL:
            normed = s[:, None] * (g_of_tail - xhat_of_tail * mean[:, None])
            both = (normed + direct_of_tail.to(tl.float32)).to(dx.dtype.element_ty)
            tl.store(dx + place + further[None, :], both, mask=left)
        if TO_WEIGHT:
            sums += dy32 * xhat.to(MIDDLE).to(tl.float32)
            if TAIL:
                sums_of_tail += dy_of_tail * xhat_of_tail.to(MIDDLE).to(tl.float32)
    if TO_WEIGHT:
        own = partial + tl.program_id(0).to(tl.int64) * COLUMNS
        tl.store(own + column, tl.sum(sums, axis=0), mask=inside)
        if TAIL:
            tl.store(own + further, tl.sum(sums_of_tail, axis=0), mask=within)
