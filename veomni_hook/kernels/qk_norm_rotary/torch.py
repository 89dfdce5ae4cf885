"""Norm and rotation of queries and keys in PyTorch: this backend's `rms_norm` kernels, then the formula.

Saved: queries, keys and weights, and cos and sin. Mutates: nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from veomni_hook.kernels.qk_norm_rotary.reference import then
from veomni_hook.kernels.qk_norm_rotary.variants import OP
from veomni_hook.kernels.rms_norm.torch import norm_of
from veomni_hook.kernels.rotary import reference as rotations

__all__ = ["kernel"]


@cache
def kernel(variant: str) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Return the function that normalises and then turns as ``variant``."""
    parts = OP.variants[variant].form
    return then(norm_of(parts.norm), getattr(rotations, parts.rotation))
