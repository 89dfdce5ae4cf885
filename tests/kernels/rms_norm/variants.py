"""Both sides of the variants, and operands for them."""

from __future__ import annotations

from functools import partial

import torch
from torch.nn import functional

from veomni_hook.kernels.rms_norm import reference
from veomni_hook.kernels.selection.registry import load_attribute, registry

__all__ = ["DTYPES", "EPS", "inputs", "pair"]

EPS = 1e-3
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def pair(backend: str, variant: str, width: int = 1):
    """The kernel of a backend and the reference of a variant, for rows of ``width``."""
    (kernel,) = (k for k in registry.kernels("rms_norm", variant) if k.backend == backend)
    further = {"eps": EPS}
    if variant.endswith("_gated"):
        further["activation"] = functional.silu
    if variant.endswith("_grouped"):
        further["group_size"] = next(size for size in range(max(width // 2, 1), 0, -1) if width % size == 0)
    return partial(load_attribute(kernel.load), **further), partial(getattr(reference, variant), **further)


def inputs(variant, shape, dtype, weight_dtype=None, device="cpu"):
    """Operands that are tensors."""
    given = [torch.randn(shape).to(device, dtype)]
    if "gate" in variant:
        given.append(torch.randn(shape).to(device, dtype))
    if "unweighted" not in variant and variant != "inverse_rms":
        given.append((torch.rand(shape[-1]) + 0.5).to(device, weight_dtype or dtype))
    return given
