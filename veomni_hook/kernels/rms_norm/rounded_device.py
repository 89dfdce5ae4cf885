"""The device code of RMSNorm with a rounded scale; `veomni_hook.kernels.rms_norm.rounded` launches it."""

import triton
import triton.language as tl

from veomni_hook.kernels.rms_norm.device import _begin, _factor

__all__ = ["forward", "inverse_backward"]

# The kernel's result: weight * x * scale with every step rounded, x * scale, or only the scale.
EVERY_STEP, SCALED, SCALE_ALONE = (tl.constexpr(kind) for kind in range(3))


@triton.jit(do_not_specialize=["rows"])
def forward(
    x, weight, y, scale, rows, n1, n2, s0, s1, s2, eps,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Multiply ``ROWS`` rows of x by their scale in x's dtype into y, and store the scale in float32."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < COLUMNS
    kept = (row < rows)[:, None] & inside[None, :]
    narrow = x.dtype.element_ty
    begin = _begin(row, n1, n2, s0, s1, s2)
    x32 = tl.load(x + begin[:, None] + column[None, :], mask=kept, other=0.0).to(tl.float32)
    square = x32 * x32
    if KIND == EVERY_STEP:
        mean = (tl.sum(square.to(narrow).to(tl.float32), axis=1) / COLUMNS).to(narrow).to(tl.float32)
        s = tl.rsqrt((mean + eps).to(narrow).to(tl.float32))
    else:
        s = tl.rsqrt(tl.sum(square, axis=1) / COLUMNS + eps)
    rounded = s.to(narrow)
    if KIND == SCALE_ALONE:
        tl.store(y + row, rounded, mask=row < rows)
        tl.store(scale + row, s, mask=row < rows)
    else:
        result = x32
        if KIND == EVERY_STEP:
            factor = _factor(weight, column, inside, 1, BLOCK)
            result = (x32 * factor[None, :]).to(y.dtype.element_ty).to(tl.float32)
        result = result * rounded.to(tl.float32)[:, None]
        tl.store(y + row[:, None] * COLUMNS + column[None, :], result.to(y.dtype.element_ty), mask=kept)
        tl.store(scale + row, rounded.to(tl.float32), mask=row < rows)


@triton.jit(do_not_specialize=["rows"])
def inverse_backward(
    x, scale, ds, dx, rows, n1, n2, s0, s1, s2,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The gradient of ``ROWS`` rows of x through their scale only."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    column = tl.arange(0, BLOCK)
    kept = (row < rows)[:, None] & (column < COLUMNS)[None, :]
    begin = _begin(row, n1, n2, s0, s1, s2)
    x32 = tl.load(x + begin[:, None] + column[None, :], mask=kept, other=0.0).to(tl.float32)
    s = tl.load(scale + row, mask=row < rows, other=0.0)
    slope = tl.load(ds + row, mask=row < rows, other=0.0).to(tl.float32) * s * s * s / -COLUMNS
    result = (x32 * slope[:, None]).to(dx.dtype.element_ty)
    tl.store(dx + row[:, None] * COLUMNS + column[None, :], result, mask=kept)
