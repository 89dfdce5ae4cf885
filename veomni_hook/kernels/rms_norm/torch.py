"""RMSNorm in PyTorch: torch's own operator for one formula, and recomputing versions of the others.

`rms_norm` uses the operator and autograd's gradients. The weight is multiplied outside: the operator would
apply it before the cast to the input's dtype, which changes a quarter of all bfloat16 results. Results are as
batch-invariant as torch's operator; tests check this.

The other functions recompute their formula in backward and save x, gate and weight for it; autograd would
save two to three times as many bytes. Results and gradients are bitwise equal to the formula's. On a GPU they
depend on the batch, like PyTorch's sums; the triton backend has batch-invariant kernels.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.nn import functional

from veomni_hook.kernels.rms_norm import reference
from veomni_hook.kernels.shared import recompute as again
from veomni_hook.kernels.shared.activations import name_of, unknown
from veomni_hook.kernels.shared.operand_checks import not_plain
from veomni_hook.kernels.shared.recompute import computed_again

__all__ = [
    "cast_before_weight",
    "cast_before_weight_gated",
    "cast_to_weight",
    "divided_by_root",
    "gate_before_norm",
    "gate_before_norm_grouped",
    "inverse_rms",
    "one_plus_weight",
    "one_plus_weight_before_norm",
    "one_plus_weight_grouped",
    "one_plus_weight_rounded",
    "refuses",
    "refuses_activation",
    "refuses_others",
    "rms_norm",
    "unweighted",
    "unweighted_rounded_scale",
    "weight_before_cast",
    "weight_before_cast_gated",
    "without_cast",
]

_DTYPES = frozenset((torch.float32, torch.bfloat16, torch.float16))


def rms_norm(hidden_states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return ``weight * xhat`` for ``hidden_states`` ``[..., hidden]`` and ``weight`` ``[hidden]``."""
    normalised = functional.rms_norm(hidden_states, weight.shape, None, eps)
    # Autocast may run the operator in float32; upstream always casts back.
    return weight * normalised.to(hidden_states.dtype)


def refuses(
    owner: Any, hidden_states: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 0.0
) -> str | None:
    """Return why this call must run the upstream code, or None.

    If a guard passes only ``hidden_states``, the weight is ``owner.weight`` and eps is assumed to fit.
    """
    weight = owner.weight if weight is None else weight
    reason = not_plain(hidden_states, weight)
    if reason is not None:
        return reason
    if hidden_states.dtype not in _DTYPES:
        return f"upstream computes {hidden_states.dtype} input in float32"
    if not isinstance(eps, (float, int)):
        return f"eps is a {type(eps).__name__}"
    if weight.ndim != 1 or hidden_states.shape[-1:] != weight.shape:
        return "the weight does not match the last dimension of the input"
    return None


def cast_before_weight(hidden_states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`rms_norm`, or the formula if that `refuses`: for operands that have not been checked."""
    formula = rms_norm if refuses(None, hidden_states, weight, eps) is None else reference.cast_before_weight
    return formula(hidden_states, weight, eps)


weight_before_cast = partial(computed_again, reference.weight_before_cast)
cast_to_weight = partial(computed_again, reference.cast_to_weight)
without_cast = partial(computed_again, reference.without_cast)
divided_by_root = partial(computed_again, reference.divided_by_root)
one_plus_weight = partial(computed_again, reference.one_plus_weight)
one_plus_weight_rounded = partial(computed_again, reference.one_plus_weight_rounded)
one_plus_weight_before_norm = partial(computed_again, reference.one_plus_weight_before_norm)
one_plus_weight_grouped = partial(computed_again, reference.one_plus_weight_grouped)
unweighted = partial(computed_again, reference.unweighted)
unweighted_rounded_scale = partial(computed_again, reference.unweighted_rounded_scale)
inverse_rms = partial(computed_again, reference.inverse_rms)
cast_before_weight_gated = partial(computed_again, reference.cast_before_weight_gated)
weight_before_cast_gated = partial(computed_again, reference.weight_before_cast_gated)
gate_before_norm = partial(computed_again, reference.gate_before_norm)
gate_before_norm_grouped = partial(computed_again, reference.gate_before_norm_grouped)

refuses_others = again.refuses


def refuses_activation(owner: Any, *operands: Any) -> str | None:
    """`refuses_others`, and rejects activations (the last operand) that may have parameters."""
    if name_of(operands[-1]) is None:
        return unknown(operands[-1])
    return again.refuses(owner, *operands)
