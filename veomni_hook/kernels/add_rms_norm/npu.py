"""A residual addition and the RMSNorm of its sum with ``npu_add_rms_norm``.

The operator computes ``weight * x * rs`` of ``x = residual + hidden_states`` for operands of one dtype;
other variants use an addition and `rms_norm.npu`. Backward: that of the norm, plus the gradient of the sum.
Shapes: residual, hidden_states ``[..., hidden]``, weight ``[hidden]``. Saved: the sum, the weight, and the
scale ``[..., 1]`` in float32. Mutates: nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from veomni_hook.kernels.add_rms_norm import skipped_calls
from veomni_hook.kernels.add_rms_norm.reference import added
from veomni_hook.kernels.rms_norm import npu as norms
from veomni_hook.kernels.rms_norm.reference import cast_before_weight as norm
from veomni_hook.kernels.shared import ascend
from veomni_hook.kernels.shared.autograd import gradients, is_recorded
from veomni_hook.kernels.shared.operators import define_op

__all__ = ["apart", "cast_before_weight", "refuses"]


def _op(residual: Tensor, hidden_states: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    y, scale, total = ascend.call("npu_add_rms_norm", residual, hidden_states, weight, eps)
    return total, y, scale


_FORWARD = define_op(
    "npu_add_rms_norm(Tensor residual, Tensor hidden_states, Tensor weight, float eps)"
    " -> (Tensor, Tensor, Tensor)",
    _op,
    lambda residual, hidden_states, weight, eps: (
        residual.new_empty(residual.shape),
        residual.new_empty(residual.shape),
        residual.new_empty((*residual.shape[:-1], 1), dtype=torch.float32),
    ),
)


class _AddRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, residual: Tensor, hidden_states: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        total, y, scale = _FORWARD(residual, hidden_states, weight, eps)
        ctx.save_for_backward(total, weight, scale)
        ctx.eps = eps
        # The last layer's sum, or an unused norm, has no gradient: do not allocate zeros for it.
        ctx.set_materialize_grads(False)
        return total, y

    @staticmethod
    def backward(ctx: Any, dtotal: Tensor | None, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        total, weight, scale = ctx.saved_tensors
        to_residual, to_hidden, to_weight, _ = ctx.needs_input_grad
        dx, dweight = dtotal, None
        if is_recorded():
            # The sum has one gradient, whichever addend it is for.
            wanted = to_residual or to_hidden, to_weight
            dx, dweight = gradients(
                lambda x, weight: (x, norm(x, weight, ctx.eps)),
                (total, weight), wanted, (dtotal, dy),
            )  # fmt: skip
        elif dy is not None:
            dx, dweight = norms.BACKWARD(dy.contiguous(), total, weight, scale)
            dx = dx if dtotal is None else dx + dtotal
            dweight = dweight.to(weight.dtype) if to_weight else None
        return dx if to_residual else None, dx if to_hidden else None, dweight, None


def cast_before_weight(
    residual: Tensor, hidden_states: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return the sum and ``weight * xhat`` of it, where ``xhat`` has the dtype of the sum."""
    # The addends may be computed only after the kernel was selected.
    alike = ascend.unfit(residual, hidden_states, weight) is None and residual.shape == hidden_states.shape
    if (
        not alike
        or not residual.numel()
        or residual.ndim < 2
        or len({each.dtype for each in (residual, hidden_states, weight)}) > 1
    ):
        return _ADDED(residual, hidden_states, weight, eps)
    call = residual.contiguous(), hidden_states.contiguous(), weight.contiguous(), float(eps)
    return _AddRmsNorm.apply(*call)  # type: ignore[no-any-return, no-untyped-call]


_ADDED = added(norms.cast_before_weight)


@cache
def apart(variant: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return an addition and then the kernel of rms_norm, for operands that have not been checked."""
    return added(getattr(norms, variant))


def refuses(
    owner: Any, residual: Tensor, hidden_states: Tensor, norm: Any, norm_class: type[nn.Module]
) -> str | None:
    """Return why this call must run the upstream code, or None. Operands: see `skipped_calls.refuses`."""
    reason = skipped_calls.refuses(owner, residual, hidden_states, norm, norm_class)
    if reason is not None:
        return reason
    parameters = [held for held in norm._parameters.values() if held is not None]
    if len(parameters) != 1:
        return f"the norm has {len(parameters)} parameters instead of only a weight"
    if (reason := ascend.unfit(residual, hidden_states)) is not None:
        return reason
    # eps is checked in the call.
    return norms.refuses(owner, residual, parameters[0], 0.0)
