"""Device code of decays; `veomni_hook.kernels.log_decay.triton` launches it.

Forward:  g = -r * softplus(z),  z = a + bias,  r = exp(log_rate);  beta = sigmoid(b)
Backward: dz = -dg * r * sigmoid(z),  dlog_rate = sum(dg * g),  da = dz,  dbias = sum(dz),
          db = dbeta * beta * (1 - beta)
softplus(z) is z above 20, as in torch, and its derivative there 1. Shapes: a, b, g, beta [rows, HEADS]; a and
b strided, as in `veomni_hook.kernels.rms_norm.device`; log_rate, bias [HEADS]. All but a, b, beta in float32.
"""

import triton
import triton.language as tl

from veomni_hook.kernels.rms_norm.device import row_begin

__all__ = ["backward", "forward"]


@triton.jit
def _softplus(z):
    """log(1 + exp(z)). Below exp(z) = 1/2 a series, since 1 + exp(z) would lose its digits."""
    e = tl.exp(tl.minimum(z, 20.0))
    s = e / (2.0 + e)
    square = s * s
    # 2 artanh(s); s is at most 1/5 there, and the first term left out less than 2e-8 of the sum.
    series = 2.0 * s * (1.0 + square * (1 / 3 + square * (1 / 5 + square * (1 / 7 + square * (1 / 9)))))
    return tl.where(z > 20.0, z, tl.where(e < 0.5, series, tl.log(1.0 + e)))


@triton.jit
def _sigmoid(z):
    return 1.0 / (1.0 + tl.exp(-z))


@triton.jit(do_not_specialize=["rows"])
def forward(
    a,  # [rows, HEADS], strided
    b,  # [rows, HEADS], strided; not read unless BOTH
    log_rate,  # [HEADS]
    bias,  # [HEADS]
    g,  # [rows, HEADS], float32: a result
    beta,  # [rows, HEADS], the dtype of b: a result; not written unless BOTH
    rows,
    size_a_1, size_a_2, stride_a_0, stride_a_1, stride_a_2,
    size_b_1, size_b_2, stride_b_0, stride_b_1, stride_b_2,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,  # a power of two that holds HEADS
    ROWS: tl.constexpr,  # per program
    BOTH: tl.constexpr,
):  # fmt: skip
    """g = -r * softplus(a + bias), beta = sigmoid(b). Grid: cdiv(rows, ROWS)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    head = tl.arange(0, BLOCK)
    inside = head < HEADS
    kept = (row < rows)[:, None] & inside[None, :]
    rate = tl.exp(tl.load(log_rate + head, mask=inside, other=0.0).to(tl.float32))
    shift = tl.load(bias + head, mask=inside, other=0.0).to(tl.float32)
    a_begin = row_begin(row, size_a_1, size_a_2, stride_a_0, stride_a_1, stride_a_2)[:, None]
    z = tl.load(a + a_begin + head[None, :], mask=kept, other=0.0).to(tl.float32) + shift[None, :]
    at = row[:, None] * HEADS + head[None, :]
    tl.store(g + at, -rate[None, :] * _softplus(z), mask=kept)
    if BOTH:
        b_begin = row_begin(row, size_b_1, size_b_2, stride_b_0, stride_b_1, stride_b_2)[:, None]
        b32 = tl.load(b + b_begin + head[None, :], mask=kept, other=0.0).to(tl.float32)
        tl.store(beta + at, _sigmoid(b32).to(beta.dtype.element_ty), mask=kept)


@triton.jit(do_not_specialize=["rows"])
def backward(
    a,  # [rows, HEADS], strided
    beta,  # [rows, HEADS]: the forward's result; not read unless BOTH
    log_rate,  # [HEADS]
    bias,  # [HEADS]
    dg,  # [rows, HEADS], float32
    dbeta,  # [rows, HEADS], the dtype of beta; not read unless BOTH
    da,  # [rows, HEADS]: a result
    db,  # [rows, HEADS]: a result; not written unless BOTH
    partial,  # [programs, 2, HEADS], float32: each program's parts of dlog_rate and dbias
    rows,
    size_a_1, size_a_2, stride_a_0, stride_a_1, stride_a_2,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,  # a power of two that holds HEADS
    ROWS: tl.constexpr,  # per step of a program
    BOTH: tl.constexpr,
):  # fmt: skip
    """da, db, and the parts of the sums over rows. Grid: programs; each takes every programs-th block."""
    head = tl.arange(0, BLOCK)
    inside = head < HEADS
    rate = tl.exp(tl.load(log_rate + head, mask=inside, other=0.0).to(tl.float32))
    shift = tl.load(bias + head, mask=inside, other=0.0).to(tl.float32)
    of_rate = tl.zeros([ROWS, BLOCK], tl.float32)
    of_bias = tl.zeros([ROWS, BLOCK], tl.float32)
    for block in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = block * ROWS + tl.arange(0, ROWS).to(tl.int64)
        kept = (row < rows)[:, None] & inside[None, :]
        a_begin = row_begin(row, size_a_1, size_a_2, stride_a_0, stride_a_1, stride_a_2)[:, None]
        z = tl.load(a + a_begin + head[None, :], mask=kept, other=0.0).to(tl.float32) + shift[None, :]
        at = row[:, None] * HEADS + head[None, :]
        incoming = -tl.load(dg + at, mask=kept, other=0.0) * rate[None, :]
        dz = incoming * tl.where(z > 20.0, 1.0, _sigmoid(z))
        tl.store(da + at, dz.to(da.dtype.element_ty), mask=kept)
        of_rate += incoming * _softplus(z)
        of_bias += dz
        if BOTH:
            y = tl.load(beta + at, mask=kept, other=0.0).to(tl.float32)
            dy = tl.load(dbeta + at, mask=kept, other=0.0).to(tl.float32)
            tl.store(db + at, (dy * (1.0 - y) * y).to(db.dtype.element_ty), mask=kept)
    own = partial + tl.program_id(0) * 2 * HEADS + head
    tl.store(own, tl.sum(of_rate, axis=0), mask=inside)
    tl.store(own + HEADS, tl.sum(of_bias, axis=0), mask=inside)
