"""What a device can do at most, measured in the same run."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import cache, partial

import torch

from veomni_hook import accelerator
from veomni_hook.tools.bench.timing import by_turns

__all__ = ["bandwidth", "product"]


@cache
def bandwidth(device: str) -> float:
    """Return bytes a second of a copy, what is read and what is written together."""
    source = torch.randn(1 << (29 if device in accelerator.TYPES else 25), device=device)
    target = torch.empty_like(source)
    (times,) = by_turns({"copy": lambda: target.copy_(source)}, device, 15).values()
    return 2 * source.nbytes / statistics.median(times) * 1e3


@cache
def product(device: str, dtype: torch.dtype) -> tuple[Callable[[], object], int]:
    """Return a large product of matrices, and its floating-point operations.

    It takes part by turns with what is compared with it: a GPU at its power limit lowers its clock. On an
    H200 this product ran at 789 TFLOP/s before a benchmark, and at 662 between steps of large experts.
    """
    size = 8192 if device in accelerator.TYPES else 2048
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return partial(torch.mm, a, b), 2 * size**3
