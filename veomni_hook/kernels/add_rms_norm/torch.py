"""A residual addition and the RMSNorm of its sum in PyTorch: an addition, then this backend's norm.

Saved: what the norm saves for the sum. Mutates: nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from veomni_hook.kernels.add_rms_norm.reference import added
from veomni_hook.kernels.rms_norm.torch import norm_of

__all__ = ["kernel"]


@cache
def kernel(variant: str) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Return the function that adds and normalises as ``variant``."""
    return added(norm_of(variant))
