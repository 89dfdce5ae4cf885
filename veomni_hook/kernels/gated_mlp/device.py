"""The device code of gated activations; `veomni_hook.kernels.gated_mlp.triton` describes what it computes.

``ROUND`` is the dtype to which upstream rounds every step. Activations, clamps and forms are numbered in the
order in which that module lists them. The sigmoid is written as 1 / (1 + exp(-x)), and tanh through it:
0.5 * (1 + tanh(z)) = sigmoid(2z), which loses no precision where tanh(z) is near -1.
"""

import triton
import triton.language as tl

__all__ = ["backward", "forward", "gated", "gated_backward"]


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
    else:  # quick_gelu
        y = x * _rounded(_sigmoid(_rounded(1.702 * x, ROUND)), ROUND)
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
    else:
        dx = _scaled_backward(x, dy, 1.702, ROUND)
    return dx


@triton.jit
def _scaled_backward(x, dy, scale, ROUND: tl.constexpr):
    """The gradient of x * sigmoid(scale * x), with upstream's steps in order."""
    s = _rounded(_sigmoid(_rounded(scale * x, ROUND)), ROUND)
    inner = _sigmoid_backward(s, _rounded(dy * x, ROUND), ROUND)
    return _rounded(dy * s, ROUND) + _rounded(inner * scale, ROUND)


@triton.jit
def _begin(row, n1, n2, s0, s1, s2):
    inner = row // n2
    return inner // n1 * s0 + inner % n1 * s1 + row % n2 * s2


@triton.jit
def _clamped(gate, up, limit, ROUND: tl.constexpr):
    gate = _rounded(tl.where(gate > limit, limit, gate), ROUND)
    up = _rounded(tl.where(up > limit, limit, tl.where(up < -limit, -limit, up)), ROUND)
    return gate, up


@triton.jit
def gated(g, u, limit, alpha, FORM: tl.constexpr, ACTIVATION: tl.constexpr, ROUND: tl.constexpr):
    """The form's result for gate and up, both float32; not rounded yet."""
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
    limit = _rounded(tl.zeros_like(gate32) + limit, ROUND)
    if FORM == 0:
        a, u = _activate(gate32, ACTIVATION, ROUND), up32
        to_up = dy32 * a
        to_gate = _activate_backward(gate32, _rounded(dy32 * up32, ROUND), ACTIVATION, ROUND)
    elif FORM == 1:
        g, u = _clamped(gate32, up32, limit, ROUND)
        a = _activate(g, ACTIVATION, ROUND)
        to_up = dy32 * a
        to_gate = _activate_backward(g, _rounded(dy32 * u, ROUND), ACTIVATION, ROUND)
        to_gate = tl.where(gate32 <= limit, to_gate, 0.0)
    elif FORM == 2:
        full = _activate(gate32, ACTIVATION, ROUND)
        a, u = _clamped(full, up32, limit, ROUND)
        to_up = dy32 * a
        to_a = tl.where(full <= limit, _rounded(dy32 * u, ROUND), 0.0)
        to_gate = _activate_backward(gate32, to_a, ACTIVATION, ROUND)
    elif FORM == 4:
        a, u = _activate(gate32, ACTIVATION, ROUND), 1.0
        to_gate, to_up = _activate_backward(gate32, dy32, ACTIVATION, ROUND), dy32
    else:
        g, u = _clamped(gate32, up32, limit, ROUND)
        s = _rounded(_sigmoid(_rounded(g * alpha, ROUND)), ROUND)
        a, u = _rounded(g * s, ROUND), _rounded(u + 1.0, ROUND)
        to_up = dy32 * a
        to_gate = _scaled_backward(g, _rounded(dy32 * u, ROUND), alpha, ROUND)
        to_gate = tl.where(gate32 <= limit, to_gate, 0.0)
    if FORM % 4 != 0:  # those that clamp
        to_up = tl.where((up32 >= -limit) & (up32 <= limit), to_up, 0.0)
    return to_gate, to_up, a * u


@triton.jit
def forward(
    gate, up, y, columns, blocks, limit, alpha, gn1, gn2, g0, g1, g2, un1, un2, u0, u1, u2,
    BLOCK: tl.constexpr, FORM: tl.constexpr, ACTIVATION: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """One block of columns of one row of y, contiguous."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    first = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK
    column = first + tl.arange(0, BLOCK)
    inside = column < columns
    g = tl.load(gate + _begin(row, gn1, gn2, g0, g1, g2) + column, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + _begin(row, un1, un2, u0, u1, u2) + column, mask=inside, other=0.0).to(tl.float32)
    result = gated(g, u, limit, alpha, FORM, ACTIVATION, ROUND)
    tl.store(y + row * columns + column, result.to(y.dtype.element_ty), mask=inside)


@triton.jit
def backward(
    gate, up, dy, dgate, dup, y, columns, blocks, limit, alpha,
    gn1, gn2, g0, g1, g2, un1, un2, u0, u1, u2, dn1, dn2, d0, d1, d2,
    BLOCK: tl.constexpr, FORM: tl.constexpr, ACTIVATION: tl.constexpr, ROUND: tl.constexpr,
    AGAIN: tl.constexpr,
):  # fmt: skip
    """One block of columns of one row of dgate and dup, contiguous; if AGAIN, also of forward's result."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    first = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK
    column = first + tl.arange(0, BLOCK)
    inside = column < columns
    gate32 = tl.load(gate + _begin(row, gn1, gn2, g0, g1, g2) + column, mask=inside, other=0.0).to(tl.float32)
    up32 = tl.load(up + _begin(row, un1, un2, u0, u1, u2) + column, mask=inside, other=0.0).to(tl.float32)
    dy32 = tl.load(dy + _begin(row, dn1, dn2, d0, d1, d2) + column, mask=inside, other=0.0).to(tl.float32)
    to_gate, to_up, product = gated_backward(gate32, up32, dy32, limit, alpha, FORM, ACTIVATION, ROUND)
    place = row * columns + column
    tl.store(dgate + place, to_gate.to(dgate.dtype.element_ty), mask=inside)
    tl.store(dup + place, to_up.to(dup.dtype.element_ty), mask=inside)
    if AGAIN:
        tl.store(y + place, product.to(y.dtype.element_ty), mask=inside)
