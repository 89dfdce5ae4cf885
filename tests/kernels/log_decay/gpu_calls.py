"""Calls of log_decay's Triton kernels that `tests.kernels.absent_gpu` compiles."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from tests.kernels.absent_gpu.operands import BF16, Call, Tensor, both_ways, empty, kernels_of


def decay_of_channels(
    kernel: Callable[..., Any], dtype: torch.dtype | None, bound: tuple[bool, float | None], *leaves: Tensor
) -> Any:
    """A decay of channels, whose last operands are no tensors."""
    return kernel(*leaves, dtype, *bound)


def calls() -> Iterator[Call]:
    """Heads of usual and odd numbers; with a decay a channel, with and without a bound."""
    for variant, kernel in kernels_of("log_decay").items():
        if variant.startswith("channels"):
            for (heads, width), bound in itertools.product(
                [(32, 128), (3, 5)], [(False, None), (True, -5.0)]
            ):
                leaves = [empty(2, 70, heads, width), empty(1, 1, heads, 1), empty(heads * width)]
                dtype = BF16 if variant == "channels_rounded_rate" else None
                call = partial(decay_of_channels, kernel, dtype, bound)
                yield f"{variant} {heads} {width} {bound[1]}", partial(both_ways, call, leaves)
            continue
        for heads in (16, 32, 64, 6, 130):
            leaves = [empty(2, 70, heads), empty(heads), empty(heads)]
            leaves += [empty(2, 70, heads)] * (variant == "softplus_and_sigmoid")
            yield f"{variant} {heads}", partial(both_ways, kernel, leaves)
