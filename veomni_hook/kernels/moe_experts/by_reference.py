"""A call of a kernel, computed by the variant's reference: what second derivatives come from."""

from __future__ import annotations

import torch
from torch import Tensor

from veomni_hook.kernels.moe_experts import reference
from veomni_hook.kernels.moe_experts.forms import Form, Operands
from veomni_hook.kernels.moe_experts.variants import LAYOUTS
from veomni_hook.kernels.shared.activations import FUNCTIONS

__all__ = ["by_reference"]


def by_reference(operands: Operands, form: Form) -> Tensor:
    """Return the result of ``form`` for ``operands``, in the dtype of the hidden states; differentiable."""
    known = {"act_fn": FUNCTIONS[form.activation], "alpha": form.alpha, "limit": form.limit}
    rest = [known[name] for name in LAYOUTS[form.variant].rest]
    x, index, weights, *stacked = operands
    cast = [weight.to(form.dtype) for weight in stacked if weight is not None]
    with torch.autocast(x.device.type, enabled=False):
        result: Tensor = reference.of(form.variant)(x.to(form.dtype), index, weights, *cast, *rest)
    return result.to(x.dtype)
