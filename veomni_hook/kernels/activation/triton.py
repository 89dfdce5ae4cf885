"""Activations in Triton: one pass forward, one pass backward.

`veomni_hook.kernels.gated_mlp.device` has the formulas, and rounds every step as upstream's operators do.
Under autocast on CUDA, these compute powers, and what follows, in float32, and so do the kernels.
Shapes: x and y ``[...]``, strided, in float32, bfloat16 or float16. Saved: x. Mutates: nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial

import torch

from veomni_hook.kernels.gated_mlp.triton import ACTIVATIONS, Plan, plan_of
from veomni_hook.kernels.shared.activations import FUNCTIONS, POWERS, widened
from veomni_hook.kernels.shared.autograd import differentiable
from veomni_hook.kernels.shared.operand_checks import DTYPES, not_plain, untraceable
from veomni_hook.kernels.shared.operators import operator
from veomni_hook.kernels.shared.rows import readable

__all__ = ["kernel", "refuses"]

Tensor = torch.Tensor

_FORMULAS = {number: FUNCTIONS[name] for name, number in ACTIVATIONS.items()}
#: The device code's number for an activation alone.
_ALONE = 4


@operator(lambda x, number, out: x.new_empty(x.shape, dtype=out))
def _activation(x: Tensor, number: int, out: torch.dtype) -> Tensor:
    y = torch.empty(x.shape, dtype=out, device=x.device)
    if 0 not in x.shape:
        (x,), (launch, grid, sizes, rows) = _planned([x], number, out, None)
        launch(grid, x, x, y, *sizes, 0.0, 0.0, *rows)
    return y


@operator(lambda x, dy, number: x.new_empty(x.shape))
def _activation_backward(x: Tensor, dy: Tensor, number: int) -> Tensor:
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if 0 not in x.shape:
        (x, _, dy), (launch, grid, sizes, rows) = _planned([x, x, dy], number, dy.dtype, False)
        launch(grid, x, x, dy, dx, dx, dx, *sizes, 0.0, 0.0, *rows)
    return dx


def _planned(
    tensors: Sequence[Tensor], number: int, out: torch.dtype, again: bool | None
) -> tuple[Sequence[Tensor], Plan]:
    """Return the tensors, copied where that is needed, and the plan; ``out`` is the dtype of the result."""
    x = tensors[0]
    code = _ALONE, number, out is not x.dtype
    places = tensors if again is not None else [x, x]
    plan = plan_of(x.device, x.dtype, x.shape, tuple(one.stride() for one in places), code, again)
    if plan is None:
        return _planned([readable(one)[0] for one in tensors], number, out, again)
    return tensors, plan


_differentiated: Callable[..., Tensor] = differentiable(
    _activation,
    lambda saved, rest, wanted, dy: (_activation_backward(*saved, dy, rest[0]),),
    lambda x, number, out: _FORMULAS[number](x.to(out)),
    tensors=1,
)


@cache
def kernel(variant: str) -> Callable[[Tensor], Tensor]:
    """Return the kernel for ``variant``."""
    return partial(_run, variant)


def _run(variant: str, x: Tensor) -> Tensor:
    out = torch.float32 if variant in POWERS and widened(x) else x.dtype
    return _differentiated(x, ACTIVATIONS[variant], out)


def refuses(owner: object, x: Tensor) -> str | None:
    """Return why this call must run the upstream code, or None."""
    reason = not_plain(x) or untraceable()
    if reason is None and (x.dtype not in DTYPES or not x.ndim):
        return f"the input has dtype {x.dtype}, or no dimension"
    return reason
