"""Device code of a decay for each channel; `veomni_hook.kernels.log_decay.channel_triton` launches it.

z = x + bias,  r = exp(log_rate), one of each head,  factor = -1 or the bound
Softplus: g = -r * softplus(z);  dx = -r * dg * sigmoid(z),  dlog_rate = -r * sum(dg * softplus(z))
Bounded:  g = factor * s,  s = sigmoid(r * z);  dx = factor * r * u,  u = dg * s * (1 - s),
          dlog_rate = factor * r * sum(u * z)
dbias = sum(dx) over rows; dlog_rate also over a head's columns. Shapes: x, g [rows, COLUMNS], COLUMNS being
heads * WIDTH; x strided, as in `veomni_hook.kernels.rms_norm.device`; log_rate [heads], bias [COLUMNS]. A
program has BLOCK columns, whose rate and bias it reads once, and every programs-th block of ROWS rows.
"""

import triton
import triton.language as tl

from veomni_hook.kernels.log_decay.device import rate_of, sigmoid, sigmoid_of, softplus_of
from veomni_hook.kernels.rms_norm.device import row_begin

__all__ = ["backward", "forward"]


@triton.jit(do_not_specialize=["rows"])
def forward(
    x,  # [rows, COLUMNS], strided
    log_rate,  # [COLUMNS / WIDTH]
    bias,  # [COLUMNS]
    g,  # [rows, COLUMNS]: the result
    rows,
    factor,
    size_x_1, size_x_2, stride_x_0, stride_x_1, stride_x_2,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    BOUNDED: tl.constexpr,
    ROUNDED: tl.constexpr,
):  # fmt: skip
    """g. Grid: cdiv(COLUMNS, BLOCK), programs."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if g.dtype.element_ty == tl.float32:
        column = tl.max_contiguous(column, 4)  # 16 bytes of g: 16 of x would change threads in shared memory
    inside = column < COLUMNS
    rate = rate_of(tl.load(log_rate + column // WIDTH, mask=inside, other=0.0), ROUNDED)[None, :]
    shift = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    for block in tl.range(tl.program_id(1), tl.cdiv(rows, ROWS), tl.num_programs(1)):
        row = block * ROWS + tl.arange(0, ROWS).to(tl.int64)
        kept = (row < rows)[:, None] & inside[None, :]
        begin = row_begin(row, size_x_1, size_x_2, stride_x_0, stride_x_1, stride_x_2)[:, None]
        z = tl.load(x + begin + column[None, :], mask=kept, other=0.0).to(tl.float32) + shift
        if BOUNDED:
            value = factor * sigmoid(rate * z)
        else:
            value = -rate * softplus_of(z, tl.exp(-tl.abs(z)))
        tl.store(g + row[:, None] * COLUMNS + column[None, :], value.to(g.dtype.element_ty), mask=kept)


@triton.jit(do_not_specialize=["rows"])
def backward(
    x,  # [rows, COLUMNS], strided
    log_rate,  # [COLUMNS / WIDTH]
    bias,  # [COLUMNS]
    dg,  # [rows, COLUMNS]
    dx,  # [rows, COLUMNS]: the result
    partial,  # [programs, 2, COLUMNS], float32: sums for dlog_rate and dbias, without factor * r
    rows,
    factor,
    size_x_1, size_x_2, stride_x_0, stride_x_1, stride_x_2,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    BOUNDED: tl.constexpr,
    ROUNDED: tl.constexpr,
):  # fmt: skip
    """dx, and the parts of the sums over rows. Grid: cdiv(COLUMNS, BLOCK), programs."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if dg.dtype.element_ty == tl.float32:
        column = tl.max_contiguous(column, 4)  # 16 bytes of dg, in neighbouring threads
    inside = column < COLUMNS
    rate = rate_of(tl.load(log_rate + column // WIDTH, mask=inside, other=0.0), ROUNDED)[None, :]
    shift = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    of_rate = tl.zeros([BLOCK], tl.float32)
    of_bias = tl.zeros([BLOCK], tl.float32)
    for block in tl.range(tl.program_id(1), tl.cdiv(rows, ROWS), tl.num_programs(1)):
        row = block * ROWS + tl.arange(0, ROWS).to(tl.int64)
        kept = (row < rows)[:, None] & inside[None, :]
        begin = row_begin(row, size_x_1, size_x_2, stride_x_0, stride_x_1, stride_x_2)[:, None]
        z = tl.load(x + begin + column[None, :], mask=kept, other=0.0).to(tl.float32) + shift
        at = row[:, None] * COLUMNS + column[None, :]
        incoming = tl.load(dg + at, mask=kept, other=0.0).to(tl.float32)
        if BOUNDED:
            s = sigmoid(rate * z)
            slope = incoming * (1.0 - s) * s
            turned = slope * z
        else:
            t = tl.exp(-tl.abs(z))
            slope = incoming * sigmoid_of(z, t)
            turned = incoming * softplus_of(z, t)
        tl.store(dx + at, (factor * rate * slope).to(dx.dtype.element_ty), mask=kept)
        # A thread has all rows of its columns, so these sums stay in its registers.
        of_rate += tl.sum(turned, axis=0)
        of_bias += tl.sum(slope, axis=0)
    own = partial + tl.program_id(1).to(tl.int64) * 2 * COLUMNS + column
    tl.store(own, of_rate, mask=inside)
    tl.store(own + COLUMNS, of_bias, mask=inside)
