"""What a device can do at most, measured in the same run."""

from __future__ import annotations

from functools import cache

import torch

from veomni_hook import accelerator
from veomni_hook.bench.timing import by_turns

__all__ = ["bandwidth", "matmul_rate"]


@cache
def bandwidth(device: str) -> float:
    """Return bytes a second of a copy, what is read and what is written together."""
    source = torch.randn(1 << (29 if device in accelerator.TYPES else 25), device=device)
    target = torch.empty_like(source)
    (median,) = by_turns({"copy": lambda: target.copy_(source)}, device, 15).values()
    return 2 * source.nbytes / median * 1e3


@cache
def matmul_rate(device: str, dtype: torch.dtype) -> float:
    """Return floating-point operations a second of a large product of matrices."""
    size = 8192 if device in accelerator.TYPES else 2048
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    (median,) = by_turns({"product": lambda: a @ b}, device, 15).values()
    return 2 * size**3 / median * 1e3
