"""RMSNorm of queries and keys and the rotary embedding of the results, by definition: norm, then rotation.

Each norm is a formula of `veomni_hook.kernels.rms_norm.reference`, each rotation one of
`veomni_hook.kernels.rotary.reference`; a variant is named after both.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from veomni_hook.kernels.rms_norm import reference as norms
from veomni_hook.kernels.rotary import reference as rotations

__all__ = [
    "cast_before_weight_half_split",
    "cast_before_weight_half_split_cast_out",
    "cast_before_weight_half_split_partial",
    "one_plus_weight_half_split",
    "one_plus_weight_half_split_cast_out",
    "one_plus_weight_half_split_partial",
    "then",
    "weight_before_cast_half_split",
    "weight_before_cast_half_split_cast_out",
    "weight_before_cast_half_split_partial",
]

Tensor = torch.Tensor


def then(
    norm: Callable[..., Tensor], rotation: Callable[..., tuple[Tensor, Tensor]]
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the function that normalises queries and keys by ``norm`` and turns both by ``rotation``."""

    def normed_and_rotated(  # noqa: PLR0913, PLR0917 - the operands of the op
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


cast_before_weight_half_split = then(norms.cast_before_weight, rotations.half_split)
cast_before_weight_half_split_cast_out = then(norms.cast_before_weight, rotations.half_split_cast_out)
cast_before_weight_half_split_partial = then(norms.cast_before_weight, rotations.half_split_partial)
weight_before_cast_half_split = then(norms.weight_before_cast, rotations.half_split)
weight_before_cast_half_split_cast_out = then(norms.weight_before_cast, rotations.half_split_cast_out)
weight_before_cast_half_split_partial = then(norms.weight_before_cast, rotations.half_split_partial)
one_plus_weight_half_split = then(norms.one_plus_weight, rotations.half_split)
one_plus_weight_half_split_cast_out = then(norms.one_plus_weight, rotations.half_split_cast_out)
one_plus_weight_half_split_partial = then(norms.one_plus_weight, rotations.half_split_partial)
