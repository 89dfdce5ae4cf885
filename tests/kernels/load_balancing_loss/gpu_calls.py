"""Calls of load_balancing_loss's Triton kernels that `tests.kernels.absent_gpu` compiles."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from tests.kernels.absent_gpu.operands import Call, both_ways, empty, kernels_of


def calls() -> Iterator[Call]:
    """Few experts and as many as it takes."""
    for variant, kernel in kernels_of("load_balancing_loss").items():
        for experts in (8, 128, 1024):
            mask = torch.ones(2, 16, dtype=torch.int64)

            def call(*layers, kernel=kernel, experts=experts, mask=mask):
                return kernel(layers, experts, 2, mask)

            yield f"{variant} {experts}", partial(both_ways, call, [empty(32, experts), empty(32, experts)])
