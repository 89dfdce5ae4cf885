"""Calls of causal_conv's Triton kernels that `tests.kernels.absent_gpu` compiles."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from tests.kernels.absent_gpu.operands import Call, both_ways, empty, kernels_of


def calls() -> Iterator[Call]:
    """Samples and rows, with and without what can be left out, at a usual and an odd number of channels."""
    (kernel,) = kernels_of("causal_conv").values()
    for channels, ends in ((8192, None), (1000, None), (8192, torch.tensor([0, 30, 64], dtype=torch.int32))):
        for biased, activation in ((False, None), (True, "silu")):

            def call(x, weight, *bias, activation=activation, ends=ends):
                return kernel(x.transpose(1, 2), weight, *(bias or (None,)), activation, ends)

            leaves = [empty(1, 64, channels), empty(channels, 4)] + [empty(channels)] * biased
            yield f"{channels} {activation} {ends is not None}", partial(both_ways, call, leaves)
