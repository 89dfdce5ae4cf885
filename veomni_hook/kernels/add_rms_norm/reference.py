"""A residual addition and the RMSNorm of the sum by definition: the oracle.

Every function takes ``residual`` and ``hidden_states`` ``[..., hidden]`` and ``weight`` ``[hidden]``, and
returns the sum and the normalised sum; which formula normalises is its name's
(`veomni_hook.kernels.rms_norm`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from veomni_hook.kernels.rms_norm import reference as norms

__all__ = [
    "cast_before_weight",
    "cast_to_weight",
    "one_plus_weight",
    "one_plus_weight_rounded",
    "weight_before_cast",
]

_Pair = tuple[torch.Tensor, torch.Tensor]


def _added(
    norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor],
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], _Pair]:
    def add_and_normalise(
        residual: torch.Tensor, hidden_states: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> _Pair:
        total = residual + hidden_states
        return total, norm(total, weight, eps)

    add_and_normalise.__doc__ = f"Return the sum and `{norm.__name__}` of it."
    return add_and_normalise


cast_before_weight = _added(norms.cast_before_weight)
weight_before_cast = _added(norms.weight_before_cast)
cast_to_weight = _added(norms.cast_to_weight)
one_plus_weight = _added(norms.one_plus_weight)
one_plus_weight_rounded = _added(norms.one_plus_weight_rounded)
