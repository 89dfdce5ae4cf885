"""Calls of row_merge's Triton kernels that `tests.kernels.absent_gpu` compiles."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from tests.kernels.absent_gpu.operands import Call, both_ways, empty, kernels_of


def calls() -> Iterator[Call]:
    """Every variant at the width of most models, at an odd one, and in several parts."""
    mask = torch.tensor([True, False]).repeat(32)
    for variant, kernel in kernels_of("row_merge").items():
        for columns in (128, 4096, 130, 5120):
            rest = (torch.Tensor.masked_scatter,) if variant == "rows" else ()
            at = mask.unsqueeze(1) if variant == "rows" else mask

            def call(x, source, kernel=kernel, at=at, rest=rest):
                return kernel(x, at, source, *rest)

            leaves = [empty(64, columns), empty(32, columns)]
            yield f"{variant} {columns}", partial(both_ways, call, leaves)
