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
    "added",
    "cast_before_weight",
    "cast_to_weight",
    "one_plus_weight",
    "one_plus_weight_rounded",
    "weight_before_cast",
]

_Pair = tuple[torch.Tensor, torch.Tensor]


def added(
    norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor],
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], _Pair]:
    """Return the function that adds, and normalises the sum by ``norm``."""

    def add_and_normalise(
        residual: torch.Tensor, hidden_states: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> _Pair:
        """Return the sum and what ``norm`` makes of it."""
        total = residual + hidden_states
        return total, norm(total, weight, eps)

    return add_and_normalise


cast_before_weight = added(norms.cast_before_weight)
weight_before_cast = added(norms.weight_before_cast)
cast_to_weight = added(norms.cast_to_weight)
one_plus_weight = added(norms.one_plus_weight)
one_plus_weight_rounded = added(norms.one_plus_weight_rounded)
