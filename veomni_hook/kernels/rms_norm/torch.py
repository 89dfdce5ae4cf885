"""RMSNorm from torch's own operator; its gradients are autograd's.

The weight is multiplied outside: given to the operator it would be applied before the cast to the input's
dtype, which changes a quarter of all bfloat16 results. A row has the same bits in any batch as far as torch's
operator keeps them: tests see to it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from veomni_hook.kernels.operands import not_plain

__all__ = ["refuses", "rms_norm"]

_DTYPES = frozenset((torch.float32, torch.bfloat16, torch.float16))


def rms_norm(hidden_states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return ``weight * xhat`` for ``hidden_states`` ``[..., hidden]`` and ``weight`` ``[hidden]``."""
    normalised = functional.rms_norm(hidden_states, weight.shape, None, eps)
    # Autocast may run the operator in float32; upstream casts back whatever happens.
    return weight * normalised.to(hidden_states.dtype)


def refuses(
    owner: Any, hidden_states: torch.Tensor, weight: torch.Tensor | None = None, eps: float | None = None
) -> str | None:
    """Return why this call must run the upstream code, or None.

    A guard that asks with ``hidden_states`` alone means the weight ``owner.weight``.
    """
    weight = owner.weight if weight is None else weight
    reason = not_plain(hidden_states, weight)
    if reason is not None:
        return reason
    if hidden_states.dtype not in _DTYPES:
        return f"upstream computes {hidden_states.dtype} input in float32"
    if eps is not None and not isinstance(eps, float | int):
        return f"eps is a {type(eps).__name__}"
    if weight.ndim != 1 or hidden_states.shape[-1:] != weight.shape:
        return "the weight does not cover exactly the last dimension"
    return None
