"""Device code of decays; `veomni_hook.kernels.log_decay.triton` launches it.

Forward:  g = -r * softplus(z),  z = a + bias,  r = exp(log_rate);  beta = sigmoid(b)
Backward: dz = -dg * r * sigmoid(z),  dlog_rate = sum(dg * g),  da = dz,  dbias = sum(dz),
          db = dbeta * beta * (1 - beta)
softplus(z) = max(z, 0) + log(1 + t) and sigmoid(z) = (1 or t) / (1 + t) share t = exp(-|z|). Above 20 they
are z and 1 in float32, as in torch. Shapes: a, b, g, beta [rows, HEADS]; a and b strided, as in
`veomni_hook.kernels.rms_norm.device`; log_rate, bias [HEADS]. All but a, b, beta in float32.

With a decay for each channel, z = x + bias, r is one of each head, and factor is -1 or the bound:
Softplus: as above;  dx = factor * r * dg * sigmoid(z),  dlog_rate = factor * r * sum(dg * softplus(z))
Bounded:  g = factor * s,  s = sigmoid(r * z);  dx = factor * r * u,  u = dg * s * (1 - s),
          dlog_rate = factor * r * sum(u * z)
dbias = sum(dx) over rows; dlog_rate also over a head's columns. Shapes: x, g [rows, COLUMNS], COLUMNS being
heads * WIDTH; log_rate [heads], bias [COLUMNS]. A program has BLOCK columns, whose rate and bias it reads
once, and every programs-th block of ROWS rows.
"""

import triton
import triton.language as tl

from veomni_hook.kernels.rms_norm.device import row_begin

__all__ = ["add_up", "backward", "backward_channels", "forward", "forward_channels"]


@triton.jit
def _softplus_of(z, t):
    """softplus(z), given t = exp(-|z|)."""
    # (log(1 + t) - t) / t^2 on [0, 1]. The result's relative error is below 2e-7, also where t is tiny.
    q = -0.030065773 + t * 0.0053648190
    q = -0.13753800 + t * (0.079204507 + t * q)
    q = -0.24857163 + t * (0.19153655 + t * q)
    q = -0.49999648 + t * (0.33321324 + t * q)
    return tl.maximum(z, 0.0) + (t + t * t * q)


@triton.jit
def _sigmoid_of(z, t):
    """sigmoid(z), given t = exp(-|z|)."""
    return tl.where(z >= 0.0, 1.0, t) / (1.0 + t)


@triton.jit
def _sigmoid(z):
    """1 / (1 + exp(-z))."""
    return 1.0 / (1.0 + tl.exp(-z))


@triton.jit
def _rate_of(stored, ROUNDED: tl.constexpr):
    """exp(stored) in float32; if ROUNDED, rounded to the dtype of ``stored``."""
    rate = tl.exp(stored.to(tl.float32))
    return rate.to(stored.dtype).to(tl.float32) if ROUNDED else rate


@triton.jit(do_not_specialize=["programs"])
def add_up(
    partial,  # [programs, 2, HEADS * WIDTH], float32
    log_rate,  # [HEADS]
    of_rate,  # [HEADS]: a result
    of_bias,  # [HEADS * WIDTH]: a result
    programs,
    factor,
    COLUMNS: tl.constexpr,  # HEADS * WIDTH
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,  # a power of two that holds WIDTH
    ROWS: tl.constexpr,  # per step
    ROUNDED: tl.constexpr,
):  # fmt: skip
    """factor * r times the sums over programs, the first also over a head's columns. Grid: HEADS."""
    head = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    first = tl.zeros([ROWS, BLOCK], tl.float32)
    second = tl.zeros([ROWS, BLOCK], tl.float32)
    for begin in range(0, programs, ROWS):
        row = begin + tl.arange(0, ROWS)
        kept = (row < programs)[:, None] & inside[None, :]
        at = partial + row[:, None] * (2 * COLUMNS) + (head * WIDTH + column)[None, :]
        first += tl.load(at, mask=kept, other=0.0)
        second += tl.load(at + COLUMNS, mask=kept, other=0.0)
    scale = factor * _rate_of(tl.load(log_rate + head), ROUNDED)
    tl.store(of_rate + head, (scale * tl.sum(tl.sum(first, axis=0), axis=0)).to(of_rate.dtype.element_ty))
    total = scale * tl.sum(second, axis=0)
    tl.store(of_bias + head * WIDTH + column, total.to(of_bias.dtype.element_ty), mask=inside)


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
    ROWS: tl.constexpr,  # per step of a program
    BOTH: tl.constexpr,
):  # fmt: skip
    """g = -r * softplus(a + bias), beta = sigmoid(b). Grid: programs; each takes every programs-th block."""
    head = tl.max_contiguous(tl.arange(0, BLOCK), 4)  # 16 bytes of g: 16 of a would change threads
    inside = head < HEADS
    rate = -_rate_of(tl.load(log_rate + head, mask=inside, other=0.0), ROUNDED=False)
    shift = tl.load(bias + head, mask=inside, other=0.0).to(tl.float32)
    for block in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = block * ROWS + tl.arange(0, ROWS).to(tl.int64)
        kept = (row < rows)[:, None] & inside[None, :]
        a_begin = row_begin(row, size_a_1, size_a_2, stride_a_0, stride_a_1, stride_a_2)[:, None]
        z = tl.load(a + a_begin + head[None, :], mask=kept, other=0.0).to(tl.float32) + shift[None, :]
        at = row[:, None] * HEADS + head[None, :]
        tl.store(g + at, rate[None, :] * _softplus_of(z, tl.exp(-tl.abs(z))), mask=kept)
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
    partial,  # [programs, 2, HEADS], float32: each program's parts of the sums, without -r
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
    rate = -_rate_of(tl.load(log_rate + head, mask=inside, other=0.0), ROUNDED=False)
    shift = tl.load(bias + head, mask=inside, other=0.0).to(tl.float32)
    of_rate = tl.zeros([ROWS, BLOCK], tl.float32)
    of_bias = tl.zeros([ROWS, BLOCK], tl.float32)
    for block in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = block * ROWS + tl.arange(0, ROWS).to(tl.int64)
        kept = (row < rows)[:, None] & inside[None, :]
        a_begin = row_begin(row, size_a_1, size_a_2, stride_a_0, stride_a_1, stride_a_2)[:, None]
        z = tl.load(a + a_begin + head[None, :], mask=kept, other=0.0).to(tl.float32) + shift[None, :]
        at = row[:, None] * HEADS + head[None, :]
        t = tl.exp(-tl.abs(z))
        incoming = tl.load(dg + at, mask=kept, other=0.0)
        slope = incoming * _sigmoid_of(z, t)
        tl.store(da + at, (rate[None, :] * slope).to(da.dtype.element_ty), mask=kept)
        of_rate += incoming * _softplus_of(z, t)
        of_bias += slope
        if BOTH:
            y = tl.load(beta + at, mask=kept, other=0.0).to(tl.float32)
            dy = tl.load(dbeta + at, mask=kept, other=0.0).to(tl.float32)
            tl.store(db + at, (dy * (1.0 - y) * y).to(db.dtype.element_ty), mask=kept)
    own = partial + tl.program_id(0) * 2 * HEADS + head
    tl.store(own, tl.sum(of_rate, axis=0), mask=inside)
    tl.store(own + HEADS, tl.sum(of_bias, axis=0), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def forward_channels(
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
    rate = _rate_of(tl.load(log_rate + column // WIDTH, mask=inside, other=0.0), ROUNDED)[None, :]
    shift = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    for block in tl.range(tl.program_id(1), tl.cdiv(rows, ROWS), tl.num_programs(1)):
        row = block * ROWS + tl.arange(0, ROWS).to(tl.int64)
        kept = (row < rows)[:, None] & inside[None, :]
        begin = row_begin(row, size_x_1, size_x_2, stride_x_0, stride_x_1, stride_x_2)[:, None]
        z = tl.load(x + begin + column[None, :], mask=kept, other=0.0).to(tl.float32) + shift
        if BOUNDED:
            value = factor * _sigmoid(rate * z)
        else:
            value = -rate * _softplus_of(z, tl.exp(-tl.abs(z)))
        tl.store(g + row[:, None] * COLUMNS + column[None, :], value.to(g.dtype.element_ty), mask=kept)


@triton.jit(do_not_specialize=["rows"])
def backward_channels(
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
    rate = _rate_of(tl.load(log_rate + column // WIDTH, mask=inside, other=0.0), ROUNDED)[None, :]
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
            s = _sigmoid(rate * z)
            slope = incoming * (1.0 - s) * s
            turned = slope * z
        else:
            t = tl.exp(-tl.abs(z))
            slope = incoming * _sigmoid_of(z, t)
            turned = incoming * _softplus_of(z, t)
        tl.store(dx + at, (factor * rate * slope).to(dx.dtype.element_ty), mask=kept)
        # A thread has all rows of its columns, so these sums stay in its registers.
        of_rate += tl.sum(turned, axis=0)
        of_bias += tl.sum(slope, axis=0)
    own = partial + tl.program_id(1).to(tl.int64) * 2 * COLUMNS + column
    tl.store(own, of_rate, mask=inside)
    tl.store(own + COLUMNS, of_bias, mask=inside)
