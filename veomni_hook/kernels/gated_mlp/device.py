"""Device code of gated activations; `veomni_hook.kernels.gated_mlp.triton` launches it.

Forward:  y = a * u, by the number ``FORM``; f is the activation of that number in `triton.ACTIVATIONS`:
          0 product        a = f(gate), u = up
          1 clamped        a = f(min(gate, limit)), u = clamp(up, -limit, limit)
          2 clamped_after  a = min(f(gate), limit), u = clamp(up, -limit, limit)
          3 scaled_sigmoid a = g * sigmoid(alpha * g), g = min(gate, limit), u = clamp(up, -limit, limit) + 1
          4 activation     a = f(gate), u = 1
Backward: dup = dy * a,  dgate = dy * u * da/dgate; 0 where clamped
Shapes: gate, up, y [rows, columns], one dtype, 16-bit or float32. The rows of an operand have three
dimensions: with sizes n1 and n2, row r begins at r // (n1 * n2) * s0 + r // n2 % n1 * s1 + r % n2 * s2.
Grid: (rows * blocks,); ``blocks`` of BLOCK columns cover a row.
Arguments are not grouped, for the reason that `veomni_hook.kernels.moe_experts.device` gives.

``ROUND`` is the dtype to which upstream rounds every step. The sigmoid is written as 1 / (1 + exp(-x)), and
tanh through it: 0.5 * (1 + tanh(z)) = sigmoid(2z), which loses no precision where tanh(z) is near -1.
"""

import triton
import triton.language as tl

from veomni_hook.kernels.shared import clamped

__all__ = ["backward", "forward", "gated", "gated_backward"]

AT_LIMIT = tl.constexpr(clamped.AT_LIMIT)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _rounded(x, ROUND: tl.constexpr):
    return x.to(ROUND).to(tl.float32)


@triton.jit
def _sigmoid_backward(s, ds, ROUND: tl.constexpr):
    """The gradient of the argument of the rounded sigmoid s; upstream's operator rounds every step."""
    return _rounded(_rounded(ds * _rounded(1.0 - s, ROUND), ROUND) * s, ROUND)


@triton.jit
def _gelu_inner(x):
    """Twice the argument of tanh: the constant is twice the root of 2 / pi."""
    return 1.5957691216057308 * (x + 0.044715 * x * x * x)


@triton.jit
def _gelu_tanh(x, CUBED: tl.constexpr, ROUND: tl.constexpr):
    """tanh(c (x + 0.044715 x^3)), or, factored, of c x (1 + 0.044715 x x), rounded after every step."""
    if CUBED:
        cube = _rounded(_rounded(x * x, ROUND) * x, ROUND)
        inner = 0.7978845608028654 * _rounded(x + _rounded(0.044715 * cube, ROUND), ROUND)
    else:
        factor = _rounded(1.0 + _rounded(_rounded(0.044715 * x, ROUND) * x, ROUND), ROUND)
        inner = _rounded(0.7978845608028654 * x, ROUND) * factor
    return _rounded(2.0 * _sigmoid(2.0 * _rounded(inner, ROUND)) - 1.0, ROUND)


@triton.jit
def _gelu_tanh_backward(x, dz, CUBED: tl.constexpr, ROUND: tl.constexpr):
    """The gradient of x from that of the argument of tanh; terms are added as autograd adds them."""
    if CUBED:
        dsum = _rounded(dz * 0.7978845608028654, ROUND)
        slope = _rounded(3.0 * _rounded(x * x, ROUND), ROUND)
        result = dsum + _rounded(_rounded(dsum * 0.044715, ROUND) * slope, ROUND)
    else:
        scaled = _rounded(0.044715 * x, ROUND)
        factor = _rounded(1.0 + _rounded(scaled * x, ROUND), ROUND)
        dfactor = _rounded(dz * _rounded(0.7978845608028654 * x, ROUND), ROUND)
        square = _rounded(dfactor * scaled, ROUND) + _rounded(_rounded(dfactor * x, ROUND) * 0.044715, ROUND)
        result = _rounded(square, ROUND) + _rounded(_rounded(dz * factor, ROUND) * 0.7978845608028654, ROUND)
    return result


@triton.jit
def _activate(x, ACTIVATION: tl.constexpr, ROUND: tl.constexpr):
    """The activation of x, rounded as upstream's operators round."""
    if ACTIVATION == 0:  # silu
        y = x / (1.0 + tl.exp(-x))
    elif ACTIVATION == 1:  # gelu_tanh
        y = x * _sigmoid(_gelu_inner(x))
    elif ACTIVATION == 2:  # gelu
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == 3:  # relu
        y = tl.where(x < 0.0, 0.0, x)
    elif ACTIVATION == 4:  # relu_squared
        y = tl.where(x < 0.0, 0.0, x * x)
    elif ACTIVATION == 5:  # sigmoid
        y = _sigmoid(x)
    elif ACTIVATION == 6:  # quick_gelu
        y = x * _rounded(_sigmoid(_rounded(1.702 * x, ROUND)), ROUND)
    else:  # gelu_tanh_cubed, gelu_tanh_factored
        y = _rounded(0.5 * x, ROUND) * _rounded(1.0 + _gelu_tanh(x, ACTIVATION == 7, ROUND), ROUND)
    return _rounded(y, ROUND)


@triton.jit
def _activate_backward(x, dy, ACTIVATION: tl.constexpr, ROUND: tl.constexpr):
    """The gradient of x from that of the activation."""
    if ACTIVATION == 0:
        s = _sigmoid(x)
        dx = dy * s * (1.0 + x * (1.0 - s))
    elif ACTIVATION == 1:
        s = _sigmoid(_gelu_inner(x))
        inner = 1.5957691216057308 * (1.0 + 3.0 * 0.044715 * x * x)
        dx = dy * (s + x * s * (1.0 - s) * inner)
    elif ACTIVATION == 2:
        below = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        density = 0.3989422804014327 * tl.exp(-0.5 * x * x)
        dx = dy * (below + x * density)
    elif ACTIVATION == 3:
        dx = tl.where(x <= 0.0, 0.0, dy)
    elif ACTIVATION == 4:
        dx = tl.where(x <= 0.0, 0.0, dy * 2.0 * x)
    elif ACTIVATION == 5:
        s = _rounded(_sigmoid(x), ROUND)
        dx = _sigmoid_backward(s, dy, ROUND)
    elif ACTIVATION == 6:
        dx = _scaled_backward(x, dy, 1.702, ROUND)
    else:
        t = _gelu_tanh(x, ACTIVATION == 7, ROUND)
        slope = _rounded(1.0 - _rounded(t * t, ROUND), ROUND)
        inner = _rounded(_rounded(dy * _rounded(0.5 * x, ROUND), ROUND) * slope, ROUND)
        outer = _rounded(_rounded(dy * _rounded(1.0 + t, ROUND), ROUND) * 0.5, ROUND)
        dx = _rounded(_gelu_tanh_backward(x, inner, ACTIVATION == 7, ROUND), ROUND) + outer
    return dx


@triton.jit
def _scaled_backward(x, dy, scale, ROUND: tl.constexpr):
    """The gradient of x * sigmoid(scale * x), with upstream's steps in order."""
    s = _rounded(_sigmoid(_rounded(scale * x, ROUND)), ROUND)
    inner = _sigmoid_backward(s, _rounded(dy * x, ROUND), ROUND)
    return _rounded(dy * s, ROUND) + _rounded(inner * scale, ROUND)


@triton.jit
def _begin(row, size_1, size_2, stride_0, stride_1, stride_2):
    """Where a row begins; the arguments are the fields of `veomni_hook.kernels.shared.rows.Rows`."""
    inner = row // size_2
    return inner // size_1 * stride_0 + inner % size_1 * stride_1 + row % size_2 * stride_2


@triton.jit
def _clamped(gate, up, limit, ROUND: tl.constexpr):
    gate = _rounded(tl.where(gate > limit, limit, gate), ROUND)
    up = _rounded(tl.where(up > limit, limit, tl.where(up < -limit, -limit, up)), ROUND)
    return gate, up


@triton.jit
def _below(x, limit):
    """Whether a gradient reaches x through min(x, limit)."""
    if AT_LIMIT:
        result = x <= limit
    else:
        result = x < limit
    return result


@triton.jit
def gated(g, u, limit, alpha, FORM: tl.constexpr, ACTIVATION: tl.constexpr, ROUND: tl.constexpr):
    """The form's result a * u for gate and up, both float32; not rounded yet."""
    if FORM % 4 != 0:  # those that clamp
        # Upstream compares with the limit in the dtype of the clamped tensor.
        limit = _rounded(tl.zeros_like(g) + limit, ROUND)
    if FORM == 0:  # product
        result = _activate(g, ACTIVATION, ROUND) * u
    elif FORM == 1:  # clamped
        g, u = _clamped(g, u, limit, ROUND)
        result = _activate(g, ACTIVATION, ROUND) * u
    elif FORM == 2:  # clamped_after
        a, u = _clamped(_activate(g, ACTIVATION, ROUND), u, limit, ROUND)
        result = a * u
    elif FORM == 4:  # the activation alone; there is no up
        result = _activate(g, ACTIVATION, ROUND)
    else:  # scaled_sigmoid
        g, u = _clamped(g, u, limit, ROUND)
        a = _rounded(g * _rounded(_sigmoid(_rounded(g * alpha, ROUND)), ROUND), ROUND)
        result = _rounded(u + 1.0, ROUND) * a
    return result


@triton.jit
def gated_backward(
    gate32, up32, dy32, limit, alpha, FORM: tl.constexpr, ACTIVATION: tl.constexpr, ROUND: tl.constexpr
):
    """The gradients of gate and up, and the result of `gated`; none is rounded yet."""
    if FORM % 4 != 0:  # those that clamp
        limit = _rounded(tl.zeros_like(gate32) + limit, ROUND)
    if FORM == 0:
        a, u = _activate(gate32, ACTIVATION, ROUND), up32
        dup = dy32 * a
        dgate = _activate_backward(gate32, _rounded(dy32 * up32, ROUND), ACTIVATION, ROUND)
    elif FORM == 1:
        g, u = _clamped(gate32, up32, limit, ROUND)
        a = _activate(g, ACTIVATION, ROUND)
        dup = dy32 * a
        dgate = _activate_backward(g, _rounded(dy32 * u, ROUND), ACTIVATION, ROUND)
        dgate = tl.where(_below(gate32, limit), dgate, 0.0)
    elif FORM == 2:
        full = _activate(gate32, ACTIVATION, ROUND)
        a, u = _clamped(full, up32, limit, ROUND)
        dup = dy32 * a
        da = tl.where(_below(full, limit), _rounded(dy32 * u, ROUND), 0.0)
        dgate = _activate_backward(gate32, da, ACTIVATION, ROUND)
    elif FORM == 4:
        a, u = _activate(gate32, ACTIVATION, ROUND), 1.0
        dgate, dup = _activate_backward(gate32, dy32, ACTIVATION, ROUND), dy32
    else:
        g, u = _clamped(gate32, up32, limit, ROUND)
        s = _rounded(_sigmoid(_rounded(g * alpha, ROUND)), ROUND)
        a, u = _rounded(g * s, ROUND), _rounded(u + 1.0, ROUND)
        dup = dy32 * a
        dgate = _scaled_backward(g, _rounded(dy32 * u, ROUND), alpha, ROUND)
        dgate = tl.where(_below(gate32, limit), dgate, 0.0)
    if FORM % 4 != 0:
        dup = tl.where(_below(up32, limit) & _below(-limit, up32), dup, 0.0)
    return dgate, dup, a * u


@triton.jit
def forward(
    gate,  # [rows, columns], any row strides
    up,  # [rows, columns], any row strides; not read if FORM is 4
    y,  # [rows, columns], contiguous: written
    columns, blocks, limit, alpha,
    size_gate_1, size_gate_2, stride_gate_0, stride_gate_1, stride_gate_2,
    size_up_1, size_up_2, stride_up_0, stride_up_1, stride_up_2,
    BLOCK: tl.constexpr, FORM: tl.constexpr, ACTIVATION: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """y = a * u: one block of columns of one row. Grid: (rows * blocks,)."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    first = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK
    column = first + tl.arange(0, BLOCK)
    mask = column < columns
    gate_row = gate + _begin(row, size_gate_1, size_gate_2, stride_gate_0, stride_gate_1, stride_gate_2)
    g = tl.load(gate_row + column, mask=mask, other=0.0).to(tl.float32)
    u = g
    if FORM != 4:
        up_row = up + _begin(row, size_up_1, size_up_2, stride_up_0, stride_up_1, stride_up_2)
        u = tl.load(up_row + column, mask=mask, other=0.0).to(tl.float32)
    result = gated(g, u, limit, alpha, FORM, ACTIVATION, ROUND)
    tl.store(y + row * columns + column, result.to(y.dtype.element_ty), mask=mask)


@triton.jit
def backward(
    gate,  # [rows, columns], any row strides
    up,  # [rows, columns], any row strides
    dy,  # [rows, columns], any row strides: the gradient of y
    dgate,  # [rows, columns], contiguous: written
    dup,  # [rows, columns], contiguous: written unless FORM is 4
    y,  # [rows, columns], contiguous: forward's result; written if RECOMPUTE
    columns, blocks, limit, alpha,
    size_gate_1, size_gate_2, stride_gate_0, stride_gate_1, stride_gate_2,
    size_up_1, size_up_2, stride_up_0, stride_up_1, stride_up_2,
    size_dy_1, size_dy_2, stride_dy_0, stride_dy_1, stride_dy_2,
    BLOCK: tl.constexpr, FORM: tl.constexpr, ACTIVATION: tl.constexpr, ROUND: tl.constexpr,
    RECOMPUTE: tl.constexpr,
):  # fmt: skip
    """dup = dy * a, dgate = dy * u * da/dgate: one block of columns of one row. Grid: (rows * blocks,)."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    first = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK
    column = first + tl.arange(0, BLOCK)
    mask = column < columns
    gate_row = gate + _begin(row, size_gate_1, size_gate_2, stride_gate_0, stride_gate_1, stride_gate_2)
    gate32 = tl.load(gate_row + column, mask=mask, other=0.0).to(tl.float32)
    up32 = gate32
    if FORM != 4:
        up_row = up + _begin(row, size_up_1, size_up_2, stride_up_0, stride_up_1, stride_up_2)
        up32 = tl.load(up_row + column, mask=mask, other=0.0).to(tl.float32)
    dy_row = dy + _begin(row, size_dy_1, size_dy_2, stride_dy_0, stride_dy_1, stride_dy_2)
    dy32 = tl.load(dy_row + column, mask=mask, other=0.0).to(tl.float32)
    dgate32, dup32, y32 = gated_backward(gate32, up32, dy32, limit, alpha, FORM, ACTIVATION, ROUND)
    place = row * columns + column
    tl.store(dgate + place, dgate32.to(dgate.dtype.element_ty), mask=mask)
    if FORM != 4:
        tl.store(dup + place, dup32.to(dup.dtype.element_ty), mask=mask)
    if RECOMPUTE:
        tl.store(y + place, y32.to(y.dtype.element_ty), mask=mask)
