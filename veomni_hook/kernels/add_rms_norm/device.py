"""The device code of an addition and RMSNorm; `veomni_hook.kernels.add_rms_norm.triton` launches it.

The backward is that of RMSNorm plus the gradient of the sum."""

import triton
import triton.language as tl

from veomni_hook.kernels.rms_norm.device import _begin, _factor

__all__ = ["forward"]


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
