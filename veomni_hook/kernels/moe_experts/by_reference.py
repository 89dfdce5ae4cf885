"""A call of a kernel, computed by the variant's reference: what second derivatives come from."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from veomni_hook.kernels.moe_experts import reference
from veomni_hook.kernels.moe_experts.forms import Form, Operands
from veomni_hook.kernels.moe_experts.variants import LAYOUTS
from veomni_hook.kernels.shared.activations import FUNCTIONS

__all__ = ["by_reference"]


def by_reference(operands: Operands, form: Form) -> Tensor:
    """Return the result of ``form`` for ``operands``, in the dtype of the hidden states; differentiable."""
    rest: tuple[Any, ...] = (FUNCTIONS[form.activation], form.limit)
    if LAYOUTS[form.variant].gate == "scaled_sigmoid":
        rest = (form.alpha, form.limit)
    elif not LAYOUTS[form.variant].gate.startswith("clamped"):
        rest = rest[:1]
    x, index, weights, *stacked = operands
    cast = [each.to(form.dtype) for each in stacked if each is not None]
    with torch.autocast(x.device.type, enabled=False):
        result: Tensor = getattr(reference, form.variant)(x.to(form.dtype), index, weights, *cast, *rest)
    return result.to(x.dtype)
