"""Calls of head_parts' Triton kernel that `tests.kernels.absent_gpu` compiles."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from tests.kernels.absent_gpu.operands import BF16, F32, Call, both_ways, empty, kernels_of


def calls() -> Iterator[Call]:
    """Widths of DeepSeek's heads, of smaller ones, and odd ones, in two dtypes."""
    kernels = kernels_of("head_parts")
    for first, second in ((128, 64), (192, 64), (64, 32), (448, 64), (7, 5), (1024, 1)):
        for dtype in (BF16, F32):
            leaves = [empty(2, 4, 70, width, dtype=dtype) for width in (first, second)]
            name = f"{first} {second} {dtype}"
            yield (
                f"joined {name}",
                partial(both_ways, lambda *parts: kernels["joined"](parts, -1, torch.cat), leaves),
            )
            whole = [empty(2, 4, 70, first + second, dtype=dtype)]
            split = partial(kernels["split"], sizes=[first, second], dim=-1, function=torch.split)
            yield f"split {name}", partial(both_ways, split, whole)
