"""A residual addition and the RMSNorm of its sum with ``npu_add_rms_norm``.

The operator computes ``weight * x * rs`` of ``x = residual + hidden_states`` for operands of one dtype;
other variants use an addition and `rms_norm.npu`. Backward: that of the norm, plus the gradient of the sum.
Shapes: residual, hidden_states ``[..., hidden]``, weight ``[hidden]``. Saved: the sum, the weight, and the
scale ``[..., 1]`` in float32. Mutates: nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor, nn

from veomni_hook.kernels.add_rms_norm.reference import added
from veomni_hook.kernels.rms_norm import npu as norms
from veomni_hook.kernels.rms_norm.reference import cast_before_weight as norm
from veomni_hook.kernels.shared import ascend
from veomni_hook.kernels.shared.autograd import differentiable
from veomni_hook.kernels.shared.operators import operator

__all__ = ["apart", "cast_before_weight", "refuses"]


@operator(
    lambda residual, hidden_states, weight, eps: (
        residual.new_empty(residual.shape),
        residual.new_empty(residual.shape),
        residual.new_empty((*residual.shape[:-1], 1), dtype=torch.float32),
    )
)
def _npu_add_rms_norm(
    residual: Tensor, hidden_states: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    y, scale, total = ascend.call("npu_add_rms_norm", residual, hidden_states, weight, eps)
    return total, y, scale


def _gradients(
    saved: Sequence[Tensor], _: object, wanted: Sequence[bool], dtotal: Tensor | None, dy: Tensor | None
) -> tuple[Tensor | None, ...]:
    if dy is None:
        return dtotal, None
    dx, dweight = norms.npu_rms_norm_backward(dy.contiguous(), *saved)
    return dx if dtotal is None else dx + dtotal, dweight.to(saved[1].dtype)


#: Takes the addends, the weight and eps.
_apply: Callable[..., tuple[Tensor, Tensor]] = differentiable(
    _npu_add_rms_norm,
    _gradients,
    lambda total, weight, eps: (total, norm(total, weight, eps)),
    tensors=3,
    results=2,
    addends=2,
    # The last layer's sum, or an unused norm, has no gradient: do not allocate zeros for it.
    sparse=True,
)


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
        or len({tensor.dtype for tensor in (residual, hidden_states, weight)}) > 1
    ):
        return _ADDED(residual, hidden_states, weight, eps)
    return _apply(residual.contiguous(), hidden_states.contiguous(), weight.contiguous(), float(eps))


_ADDED = added(norms.cast_before_weight)


@cache
def apart(variant: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return an addition and then the kernel of rms_norm, for operands that have not been checked."""
    return added(getattr(norms, variant))


def refuses(
    owner: object, residual: Tensor, hidden_states: Tensor, norm: nn.Module, norm_class: type[nn.Module]
) -> str | None:
    """Return what the kernel refuses, beside `skipped_calls`, or None."""
    parameters = [parameter for parameter in norm._parameters.values() if parameter is not None]
    if len(parameters) != 1:
        return f"the norm has {len(parameters)} parameters instead of only a weight"
    if (reason := ascend.unfit(residual, hidden_states)) is not None:
        return reason
    # eps is checked in the call.
    return norms.refuses(owner, residual, parameters[0], 0.0)
