"""Gated SiLU with ``npu_swiglu``, which takes gate and up side by side: one copy, one operator each way.

Forward:  y = silu(gate) * up
Backward: [dgate, dup] = npu_swiglu_backward(dy, [gate, up])
Shapes: gate, up, y ``[..., intermediate]``, one dtype. Saved: gate and up side by side, instead of the two.
Mutates: nothing. The operator documents no rounding between activation and product; upstream rounds there.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from veomni_hook.kernels.gated_mlp import reference
from veomni_hook.kernels.shared import ascend
from veomni_hook.kernels.shared.activations import name_of, unknown
from veomni_hook.kernels.shared.autograd import differentiable
from veomni_hook.kernels.shared.operators import operator

__all__ = ["clamped", "npu_swiglu", "npu_swiglu_backward", "product", "product_float32", "refuses"]

_Activation = Callable[[Tensor], Tensor]
# The operator takes 1 to 8 dimensions.
_MOST_DIMENSIONS = 8


@operator(lambda x: x.new_empty((*x.shape[:-1], x.shape[-1] // 2)))
def npu_swiglu(x: Tensor) -> Tensor:
    """Return the product of gate and up side by side, ``[..., 2 * intermediate]``, contiguous, not empty."""
    y: Tensor = ascend.call("npu_swiglu", x, dim=-1)
    return y


@operator(lambda dy, x: x.new_empty(x.shape))
def npu_swiglu_backward(dy: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of both, from that of the product."""
    dx: Tensor = ascend.call("npu_swiglu_backward", dy, x, dim=-1)
    return dx


def _definition(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return reference.product(gate, up, functional.silu)


_swiglu: Callable[..., Tensor] = differentiable(
    npu_swiglu,
    lambda saved, rest, wanted, dy: (npu_swiglu_backward(dy.contiguous(), *saved),),
    _definition,
    tensors=1,
)


def _unusual(gate: Tensor, up: Tensor) -> bool:
    """Whether the projections returned operands that only the formula supports."""
    return (
        ascend.unfit(gate, up) is not None
        or gate.dtype is not up.dtype
        or gate.shape != up.shape
        or not 0 < gate.ndim <= _MOST_DIMENSIONS
        or not gate.numel()
    )


def product(gate: Tensor, up: Tensor, activation: _Activation) -> Tensor:
    """Return ``silu(gate) * up``; `refuses` has checked that ``activation`` is SiLU."""
    if _unusual(gate, up):
        return reference.product(gate, up, activation)
    # Autograd knows the copy: a recorded backward finds in it how gate and up came about.
    return _swiglu(torch.cat((gate, up), dim=-1))


def product_float32(gate: Tensor, up: Tensor, activation: _Activation) -> Tensor:
    """Return ``silu(gate) * up``, computed in float32, in the dtype of ``gate``."""
    return product(gate.float(), up.float(), activation).to(gate.dtype)


def clamped(gate: Tensor, up: Tensor, activation: _Activation, limit: float) -> Tensor:
    """Return ``silu(gate) * up``, with ``gate`` clamped above at ``limit`` and ``up`` on both sides."""
    return product(gate.clamp(max=limit), up.clamp(min=-limit, max=limit), activation)


def refuses(owner: object, x: Tensor, activation: object) -> str | None:
    """Return why this call of the MLP ``owner`` must run the upstream code, or None."""
    return unknown(activation, "SiLU") if name_of(activation) != "silu" else ascend.unfit(x)
