"""RMSNorm in PyTorch: torch's own operator for one formula; other formulas are recomputed in the backward.

`rms_norm` uses the operator and autograd's gradients. The weight is multiplied outside: the operator would
apply it before the cast to the input's dtype, which changes a quarter of all bfloat16 results. Results are as
batch-invariant as torch's operator; tests check this.

Formulas that are recomputed (`veomni_hook.kernels.shared.recompute`) save x, gate and weight; autograd would
save two to three times as many bytes. On a GPU their results depend on the batch, like PyTorch's sums; the
triton backend has batch-invariant kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from veomni_hook.kernels.rms_norm import reference
from veomni_hook.kernels.rms_norm.variants import OP
from veomni_hook.kernels.shared import recompute
from veomni_hook.kernels.shared.activations import name_of, unknown
from veomni_hook.kernels.shared.operand_checks import DTYPES, not_plain

__all__ = ["norm_of", "refuses", "refuses_activation", "rms_norm"]


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
    if hidden_states.dtype not in DTYPES:
        return f"upstream computes {hidden_states.dtype} input in float32"
    if not isinstance(eps, (float, int)):
        return f"eps is a {type(eps).__name__}"
    if weight.ndim != 1 or hidden_states.shape[-1:] != weight.shape:
        return "the weight does not match the last dimension of the input"
    return None


def _operator_or_formula(hidden_states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`rms_norm`, or the formula if that `refuses`."""
    formula = rms_norm if refuses(None, hidden_states, weight, eps) is None else reference.cast_before_weight
    return formula(hidden_states, weight, eps)


def norm_of(variant: str) -> Callable[..., torch.Tensor]:
    """Return what computes a variant in PyTorch, for operands that have not been checked."""
    if variant == "cast_before_weight":
        return _operator_or_formula
    return recompute.recomputed(OP.variants[variant].reference)


def refuses_activation(owner: object, *operands: object) -> str | None:
    """`recompute.refuses`, and rejects activations (the last operand) that may have parameters."""
    if name_of(operands[-1]) is None:
        return unknown(operands[-1])
    return recompute.refuses(owner, *operands)
