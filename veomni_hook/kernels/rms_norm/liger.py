"""RMSNorm with Liger's Triton kernels, only if selected by name.

Mutates: nothing; the incoming gradient is preserved (Liger's ``in_place=False``). Strided rows are copied.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch
from liger_kernel.ops.rms_norm import LigerRMSNormFunction

from veomni_hook.kernels.rms_norm.variants import OP
from veomni_hook.kernels.shared.autograd import differentiated_once

__all__ = ["kernel"]

#: What Liger adds to the weight, by the factor of a variant, and its names for the casts.
_OFFSETS = {"weight": 0.0, "one_plus": 1.0}
_CASTING = {"x": "llama", "float32": "gemma"}


def _norm(
    offset: float, casting: str, hidden_states: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    result = LigerRMSNormFunction.apply(hidden_states, weight, eps, offset, casting, False)
    return differentiated_once("rms_norm=liger", result)


@cache
def kernel(variant: str) -> Callable[..., torch.Tensor]:
    """Return the function that normalises ``hidden_states`` ``[..., hidden]`` as ``variant``."""
    norm = OP.variants[variant].form
    return partial(_norm, _OFFSETS[norm.factor], _CASTING[norm.rounded_to])
