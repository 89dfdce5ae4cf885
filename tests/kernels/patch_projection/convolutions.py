"""Convolutions with the operands that they may have, and calls of kernels with these as tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from tests.kernels.matching import DEVICE

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


class Case(NamedTuple):
    """A convolution, and its input without the batch: channels, then sizes."""

    kind: type[Any]
    kernel: tuple[int, ...]
    size: tuple[int, ...]
    batch: int = 3
    bias: bool = True
    out: int = 5


CASES = {
    "one block of 3 dimensions": Case(nn.Conv3d, (2, 3, 3), (3, 2, 3, 3), batch=7),
    "one block without bias": Case(nn.Conv3d, (2, 4, 2), (3, 2, 4, 2), bias=False),
    "one block of 2 dimensions": Case(nn.Conv2d, (3, 5), (3, 3, 5)),
    "one block of 1 dimension": Case(nn.Conv1d, (4,), (6, 4)),
    "an image": Case(nn.Conv2d, (4, 4), (3, 8, 12)),
    "an image without bias": Case(nn.Conv2d, (2, 3), (3, 8, 9), bias=False),
    "an image with a remainder": Case(nn.Conv2d, (4, 3), (2, 11, 14)),
    "a remainder of one block": Case(nn.Conv2d, (4, 4), (2, 7, 5)),
    "a video": Case(nn.Conv3d, (2, 3, 2), (3, 4, 6, 4)),
    "a video with a remainder": Case(nn.Conv3d, (2, 3, 2), (1, 5, 7, 9)),
    "a sequence": Case(nn.Conv1d, (4,), (6, 13)),
    "one row of blocks": Case(nn.Conv2d, (4, 4), (3, 4, 12)),
    "one channel, one result": Case(nn.Conv2d, (2, 2), (1, 6, 4), out=1),
    "blocks of one value": Case(nn.Conv2d, (1, 1), (3, 4, 2)),
    "no images": Case(nn.Conv2d, (4, 4), (3, 8, 12), batch=0),
    "no blocks": Case(nn.Conv3d, (2, 3, 3), (3, 2, 3, 3), batch=0),
}


def inputs(case: Case, dtype: torch.dtype, parameters: torch.dtype | None = None) -> list[torch.Tensor]:
    """The input, the weight and, where there is one, the bias."""
    channels, *sizes = case.size
    weight = torch.randn(case.out, channels, *case.kernel) * (channels * 4) ** -0.5
    kept = [weight, torch.randn(case.out)] if case.bias else [weight]
    x = torch.randn(case.batch, channels, *sizes)
    return [x.to(DEVICE, dtype), *(each.to(DEVICE, parameters or dtype) for each in kept)]


def of_tensors(kernel: Callable[..., Any], case: Case) -> Callable[..., Any]:
    """``kernel`` as a function of tensors: the input, then the parameters."""
    made = case.kind(case.size[0], case.out, case.kernel, stride=case.kernel, bias=case.bias)

    def call(x: torch.Tensor, *parameters: torch.Tensor) -> Any:
        # As plain tensors, so that what is computed has their gradients.
        made._parameters.update(dict(zip(("weight", "bias"), parameters, strict=False)))
        return kernel(x, made)

    return call
