"""The gate between an expert's two products, and its derivative: the reference for every backend.

Forward:  y = a(g) * u, clamped or not, a(g) alone, or (u + 1) * g * sigmoid(alpha * g)
Backward: dg, du by the chain rule; 0 where a clamp acts, at the limit itself as torch has it
Shapes: g and u are the halves of ``both`` ``[rows, width]`` or its even and odd columns; y ``[rows, inner]``.
Saved: nothing, ``backward`` recomputes y. Mutates: nothing. Every step is in the dtype of ``both``, for
``product_float32`` in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from veomni_hook.kernels.moe_experts.forms import Form
from veomni_hook.kernels.moe_experts.variants import LAYOUTS
from veomni_hook.kernels.shared.activations import FUNCTIONS
from veomni_hook.kernels.shared.clamped import AT_LIMIT

__all__ = ["backward", "forward"]

_ops = torch.ops.aten
_below = torch.le if AT_LIMIT else torch.lt


def _scaled_sigmoid_backward(grad: Tensor, x: Tensor, sigmoid: Tensor, alpha: float) -> Tensor:
    """The gradient of ``x * sigmoid(alpha * x)``."""
    return grad * sigmoid * (1 + alpha * x * (1 - sigmoid))


#: The same function however it is written.
_GELU_TANH = partial(_ops.gelu_backward, approximate="tanh")
_BACKWARD: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "silu": _ops.silu_backward,
    "gelu_tanh": _GELU_TANH,
    "gelu_tanh_cubed": _GELU_TANH,
    "gelu_tanh_factored": _GELU_TANH,
    "gelu": _ops.gelu_backward,
    "relu": lambda grad, x: grad * (x > 0),
    "relu_squared": lambda grad, x: grad * (2 * x.clamp(min=0)),
    "sigmoid": lambda grad, x: _ops.sigmoid_backward(grad, torch.sigmoid(x)),
    "quick_gelu": lambda grad, x: _scaled_sigmoid_backward(grad, x, torch.sigmoid(1.702 * x), 1.702),
}


def forward(both: Tensor, form: Form) -> Tensor:
    """Return y ``[rows, inner]`` in the dtype of ``both``."""
    gate, activate = LAYOUTS[form.variant].gate, FUNCTIONS[form.activation]
    if gate == "activation":
        return activate(both)
    g, u = _parts(both, form)
    if gate == "product":
        return activate(g).mul_(u)
    if gate == "product_float32":
        return activate(g.float()).mul_(u.float()).to(both.dtype)
    u = u.clamp(-form.limit, form.limit)
    if gate == "clamped_after":
        return u.mul_(activate(g).clamp_(max=form.limit))
    g = g.clamp(max=form.limit)
    if gate == "clamped":
        return u.mul_(activate(g))
    return u.add_(1).mul_(g.mul_(torch.sigmoid(g * form.alpha)))


def backward(both: Tensor, dy: Tensor, form: Form) -> tuple[Tensor, Tensor]:
    """Return y and the gradient of ``both``, in its dtype, which is also that of ``dy``."""
    gate, activate = LAYOUTS[form.variant].gate, FUNCTIONS[form.activation]
    activate_backward = _BACKWARD[form.activation]
    if gate == "activation":
        return activate(both), activate_backward(dy, both)
    gradient = torch.empty_like(both)
    (g, u), (dg, du) = _parts(both, form), _parts(gradient, form)
    if gate == "product_float32":
        g, u, dy = g.float(), u.float(), dy.float()
    if gate in ("product", "product_float32"):
        a = activate(g)
        dg.copy_(activate_backward(dy * u, g))
        du.copy_(dy * a)
        return a.mul_(u).to(both.dtype), gradient
    limit = form.limit
    inside, v = _below(u.abs(), limit), u.clamp(-limit, limit)
    if gate == "clamped_after":
        raw = activate(g)
        a = raw.clamp(max=limit)
        dg.copy_(activate_backward(dy * v * _below(raw, limit), g))
        du.copy_(dy * a * inside)
        return a.mul_(v), gradient
    below, c = _below(g, limit), g.clamp(max=limit)
    if gate == "clamped":
        a, factor = activate(c), v
        dg.copy_(activate_backward(dy * v, c) * below)
    else:
        sigmoid, factor = torch.sigmoid(c * form.alpha), v + 1
        a = c * sigmoid
        dg.copy_(_scaled_sigmoid_backward(dy * factor, c, sigmoid, form.alpha) * below)
    du.copy_(dy * a * inside)
    return a.mul_(factor), gradient


def _parts(both: Tensor, form: Form) -> tuple[Tensor, Tensor]:
    if LAYOUTS[form.variant].interleaved:
        return both[:, ::2], both[:, 1::2]
    half = both.shape[1] // 2
    return both[:, :half], both[:, half:]
