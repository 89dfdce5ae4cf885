"""A residual addition and the RMSNorm of the sum by definition: the oracle.

The function of a variant takes ``residual`` and ``hidden_states`` ``[..., hidden]`` and ``weight``
``[hidden]``, and returns the sum and the normalised sum.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from veomni_hook.kernels.rms_norm import reference as norms

__all__ = ["added", "of"]

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


@cache
def of(variant: str) -> Callable[..., _Pair]:
    """Return the function that adds and normalises by the formula of rms_norm of this name."""
    return added(getattr(norms, variant))
