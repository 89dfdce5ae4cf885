"""RMSNorm of queries and keys and the rotary embedding of the results, by definition: norm, then rotation.

Each norm is a formula of `veomni_hook.kernels.rms_norm.reference`, each rotation one of
`veomni_hook.kernels.rotary.reference`; a variant is named after both.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from veomni_hook.kernels.qk_norm_rotary.variants import OP
from veomni_hook.kernels.rms_norm import reference as norms
from veomni_hook.kernels.rotary import reference as rotations

__all__ = ["of", "then"]

Tensor = torch.Tensor


def then(
    norm: Callable[..., Tensor], rotation: Callable[..., tuple[Tensor, Tensor]]
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the function that normalises queries and keys by ``norm`` and turns both by ``rotation``."""

    def normed_and_rotated(
        q: Tensor,
        k: Tensor,
        q_weight: Tensor,
        k_weight: Tensor,
        q_eps: float,
        k_eps: float,
        cos: Tensor,
        sin: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return rotated norms of ``q`` and ``k``, each ``[batch, heads, length, head_dim]``.

        Weights are ``[head_dim]``, ``cos`` and ``sin`` ``[batch or 1, length, width]``.
        """
        return rotation(norm(q, q_weight, q_eps), norm(k, k_weight, k_eps), cos, sin)

    return normed_and_rotated


@cache
def of(variant: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the function that normalises and then turns, both by definition."""
    parts = OP.variants[variant].form
    return then(getattr(norms, parts.norm), getattr(rotations, parts.rotation))
