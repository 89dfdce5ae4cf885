"""A residual addition and the RMSNorm of its sum in PyTorch: an addition, then this backend's norm.

Saved: what the norm saves for the sum. Mutates: nothing.
"""

from __future__ import annotations

from veomni_hook.kernels.add_rms_norm.reference import added
from veomni_hook.kernels.rms_norm import torch as norms

__all__ = [
    "cast_before_weight",
    "cast_to_weight",
    "one_plus_weight",
    "one_plus_weight_rounded",
    "weight_before_cast",
]

cast_before_weight = added(norms.cast_before_weight)
weight_before_cast = added(norms.weight_before_cast)
cast_to_weight = added(norms.cast_to_weight)
one_plus_weight = added(norms.one_plus_weight)
one_plus_weight_rounded = added(norms.one_plus_weight_rounded)
