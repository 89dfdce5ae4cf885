"""Norm and rotation of queries and keys in PyTorch: this backend's `rms_norm` kernels, then the formula.

Saved: queries, keys and weights, and cos and sin. Mutates: nothing.
"""

from __future__ import annotations

from veomni_hook.kernels.qk_norm_rotary.reference import then
from veomni_hook.kernels.rms_norm import torch as norms
from veomni_hook.kernels.rotary import reference as rotations

__all__ = [
    "cast_before_weight_half_split",
    "cast_before_weight_half_split_cast_out",
    "cast_before_weight_half_split_partial",
    "one_plus_weight_half_split",
    "one_plus_weight_half_split_cast_out",
    "one_plus_weight_half_split_partial",
    "weight_before_cast_half_split",
    "weight_before_cast_half_split_cast_out",
    "weight_before_cast_half_split_partial",
]

cast_before_weight_half_split = then(norms.cast_before_weight, rotations.half_split)
cast_before_weight_half_split_cast_out = then(norms.cast_before_weight, rotations.half_split_cast_out)
cast_before_weight_half_split_partial = then(norms.cast_before_weight, rotations.half_split_partial)
weight_before_cast_half_split = then(norms.weight_before_cast, rotations.half_split)
weight_before_cast_half_split_cast_out = then(norms.weight_before_cast, rotations.half_split_cast_out)
weight_before_cast_half_split_partial = then(norms.weight_before_cast, rotations.half_split_partial)
one_plus_weight_half_split = then(norms.one_plus_weight, rotations.half_split)
one_plus_weight_half_split_cast_out = then(norms.one_plus_weight, rotations.half_split_cast_out)
one_plus_weight_half_split_partial = then(norms.one_plus_weight, rotations.half_split_partial)
