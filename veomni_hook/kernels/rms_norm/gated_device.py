"""Device code of RMSNorm with gates and groups; `veomni_hook.kernels.rms_norm.gated` launches it.

With a = silu(gate) or, without SILU, sigmoid(gate), and one s = rsqrt(mean(z^2) + eps), xhat = z * s for each
row of each group, in float32, by PLACE:

Forward:  GROUPED        z = x,                         y = inner = factor * xhat.to(MIDDLE)
          WEIGHT_BEFORE  z = (factor * x).to(x.dtype),  y = xhat
          GATE_BEFORE    z = x * a,                     y = inner
          GATE_AFTER     z = x,                         y = inner.to(INNER) * a
Backward: dz = s * (g - xhat * mean(g * xhat))
          GROUPED        g = factor * dy,      dx = dz,           dweight = sum of dy * xhat.to(MIDDLE)
          WEIGHT_BEFORE  g = dy,               dx = dz * factor,  dweight = sum of dz * x
          GATE_BEFORE    g = factor * dy,      dx = dz * a,       dweight as GROUPED, dgate = dz * x * a'
          GATE_AFTER     g = factor * dy * a,  dx = dz,           dweight of dy * a, dgate = dy * inner * a'
Shapes: rows have GROUPS groups of COLUMNS columns. Strides, dtypes and ``factor``: as in
`veomni_hook.kernels.rms_norm.device`, whose kernels are apart: the address, sizes and strides of a gate would
make every launch of a plain norm dearer. Without a gate, its parameters get values that are not used.
"""

import triton
import triton.language as tl

from veomni_hook.kernels.rms_norm.device import inverse_rms, load_factor, row_begin, through_norm

__all__ = ["backward", "forward"]

# PLACE: only groups, the weight before the norm, a gate before the norm, a gate after the norm.
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
    x,  # [rows, GROUPS * COLUMNS], strided: the input
    gate,  # [rows, GROUPS * COLUMNS], strided; not read if PLACE is GROUPED or WEIGHT_BEFORE
    weight,  # [GROUPS * COLUMNS]
    y,  # [rows, GROUPS * COLUMNS]: the result
    scale,  # [rows, GROUPS], float32: the result s
    rows,
    size_x_1, size_x_2, stride_x_0, stride_x_1, stride_x_2,
    size_gate_1, size_gate_2, stride_gate_0, stride_gate_1, stride_gate_2,
    eps,
    COLUMNS: tl.constexpr,  # of a group
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,  # a power of two that holds COLUMNS
    ROWS: tl.constexpr,  # per program
    FACTOR: tl.constexpr,
    PLACE: tl.constexpr,
    SILU: tl.constexpr,
    MIDDLE: tl.constexpr,  # dtype
    INNER: tl.constexpr,  # dtype
):  # fmt: skip
    """y by PLACE, as above. Grid: cdiv(rows, ROWS), GROUPS."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    column_of_group = tl.arange(0, BLOCK)
    column = tl.program_id(1) * COLUMNS + column_of_group
    inside = column_of_group < COLUMNS
    kept = (row < rows)[:, None] & inside[None, :]
    x_begin = row_begin(row, size_x_1, size_x_2, stride_x_0, stride_x_1, stride_x_2)
    z = tl.load(x + x_begin[:, None] + column[None, :], mask=kept, other=0.0).to(tl.float32)
    factor = load_factor(weight, column, inside, FACTOR, BLOCK)[None, :]
    if PLACE >= GATE_BEFORE:
        gate_begin = row_begin(row, size_gate_1, size_gate_2, stride_gate_0, stride_gate_1, stride_gate_2)
        gate32 = tl.load(gate + gate_begin[:, None] + column[None, :], mask=kept, other=0.0).to(tl.float32)
        activated = _activated(gate32, tl.sigmoid(gate32), SILU)
    if PLACE == GATE_BEFORE:
        z = z * activated
    if PLACE == WEIGHT_BEFORE:
        z = (z * factor).to(x.dtype.element_ty).to(tl.float32)
    s = inverse_rms(z, eps, COLUMNS)
    result = (z * s[:, None]).to(MIDDLE).to(tl.float32)
    if PLACE != WEIGHT_BEFORE:
        result = (result * factor).to(INNER).to(tl.float32)
    if PLACE == GATE_AFTER:
        result = result * activated
    y_place = y + row[:, None] * (GROUPS * COLUMNS) + column[None, :]
    tl.store(y_place, result.to(y.dtype.element_ty), mask=kept)
    tl.store(scale + row * GROUPS + tl.program_id(1), s, mask=row < rows)


@triton.jit(do_not_specialize=["rows"])
def backward(
    x,  # [rows, GROUPS * COLUMNS], strided: the forward's input
    gate,  # [rows, GROUPS * COLUMNS], strided; not read if PLACE is GROUPED or WEIGHT_BEFORE
    weight,  # [GROUPS * COLUMNS]
    scale,  # [rows, GROUPS], float32: the forward's s
    dy,  # [rows, GROUPS * COLUMNS], strided: the gradient of y
    dx,  # [rows, GROUPS * COLUMNS], the dtype of x: a result
    dgate,  # [rows, GROUPS * COLUMNS], the dtype of gate: a result; not written without a gate
    partial,  # [programs, GROUPS * COLUMNS], float32: each program's part of dweight; only if TO_WEIGHT
    rows,
    size_x_1, size_x_2, stride_x_0, stride_x_1, stride_x_2,
    size_gate_1, size_gate_2, stride_gate_0, stride_gate_1, stride_gate_2,
    size_dy_1, size_dy_2, stride_dy_0, stride_dy_1, stride_dy_2,
    COLUMNS: tl.constexpr,  # of a group
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,  # a power of two that holds COLUMNS
    ROWS: tl.constexpr,  # per step of a program
    FACTOR: tl.constexpr,
    PLACE: tl.constexpr,
    SILU: tl.constexpr,
    MIDDLE: tl.constexpr,  # dtype
    INNER: tl.constexpr,  # dtype
    TO_WEIGHT: tl.constexpr,
    STAGES: tl.constexpr,  # loads in flight
):  # fmt: skip
    """dx, dgate and partial by PLACE, as above.

    Grid: programs, each of which handles every programs-th block of ROWS rows; GROUPS.
    """
    column_of_group = tl.arange(0, BLOCK)
    column = tl.program_id(1) * COLUMNS + column_of_group
    inside = column_of_group < COLUMNS
    factor = load_factor(weight, column, inside, FACTOR, BLOCK)[None, :]
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for block in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = block * ROWS + tl.arange(0, ROWS).to(tl.int64)
        kept = (row < rows)[:, None] & inside[None, :]
        x_begin = row_begin(row, size_x_1, size_x_2, stride_x_0, stride_x_1, stride_x_2)
        dy_begin = row_begin(row, size_dy_1, size_dy_2, stride_dy_0, stride_dy_1, stride_dy_2)
        x32 = tl.load(x + x_begin[:, None] + column[None, :], mask=kept, other=0.0).to(tl.float32)
        dy32 = tl.load(dy + dy_begin[:, None] + column[None, :], mask=kept, other=0.0).to(tl.float32)
        s = tl.load(scale + row * GROUPS + tl.program_id(1), mask=row < rows, other=0.0)
        place = row[:, None] * (GROUPS * COLUMNS) + column[None, :]
        z = x32
        if PLACE >= GATE_BEFORE:
            gate_begin = row_begin(row, size_gate_1, size_gate_2, stride_gate_0, stride_gate_1, stride_gate_2)
            gate32 = tl.load(gate + gate_begin[:, None] + column[None, :], mask=kept, other=0.0)
            gate32 = gate32.to(tl.float32)
            sigmoid = tl.sigmoid(gate32)
            activated = _activated(gate32, sigmoid, SILU)
            slope = _slope(gate32, sigmoid, SILU)
        if PLACE == GATE_BEFORE:
            z = x32 * activated
        if PLACE == WEIGHT_BEFORE:
            z = (x32 * factor).to(x.dtype.element_ty).to(tl.float32)
        xhat = z * s[:, None]
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
        dz = through_norm(g, xhat, mean, s)
        if PLACE == WEIGHT_BEFORE:
            if TO_WEIGHT:
                total += dz * x32
            dz = dz * factor
        if PLACE == GATE_BEFORE:
            tl.store(dgate + place, (dz * x32 * slope).to(dgate.dtype.element_ty), mask=kept)
            dz = dz * activated
        tl.store(dx + place, dz.to(dx.dtype.element_ty), mask=kept)
    if TO_WEIGHT:
        partial_row = tl.program_id(0).to(tl.int64) * (GROUPS * COLUMNS) + column
        tl.store(partial + partial_row, tl.sum(total, axis=0), mask=inside)
