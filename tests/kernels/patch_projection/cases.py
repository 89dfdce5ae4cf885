"""Calls of convolutions whose blocks do not overlap."""

from typing import Any, NamedTuple

import torch
from torch import nn

from tests.kernels.contract import Case


class Convolution(NamedTuple):
    """A convolution, and its input without the batch: channels, then sizes."""

    kind: type[Any]
    kernel: tuple[int, ...]
    size: tuple[int, ...]
    batch: int = 3
    bias: bool = True
    out: int = 5


CONVOLUTIONS = {
    "one block of 3 dimensions": Convolution(nn.Conv3d, (2, 3, 3), (3, 2, 3, 3), batch=7),
    "one block without bias": Convolution(nn.Conv3d, (2, 4, 2), (3, 2, 4, 2), bias=False),
    "one block of 2 dimensions": Convolution(nn.Conv2d, (3, 5), (3, 3, 5)),
    "one block of 1 dimension": Convolution(nn.Conv1d, (4,), (6, 4)),
    "an image": Convolution(nn.Conv2d, (4, 4), (3, 8, 12)),
    "an image without bias": Convolution(nn.Conv2d, (2, 3), (3, 8, 9), bias=False),
    "an image with a remainder": Convolution(nn.Conv2d, (4, 3), (2, 11, 14)),
    "a remainder of one block": Convolution(nn.Conv2d, (4, 4), (2, 7, 5)),
    "a video": Convolution(nn.Conv3d, (2, 3, 2), (3, 4, 6, 4)),
    "a video with a remainder": Convolution(nn.Conv3d, (2, 3, 2), (1, 5, 7, 9)),
    "a sequence": Convolution(nn.Conv1d, (4,), (6, 13)),
    "one row of blocks": Convolution(nn.Conv2d, (4, 4), (3, 4, 12)),
    "one channel, one result": Convolution(nn.Conv2d, (2, 2), (1, 6, 4), out=1),
    "blocks of one value": Convolution(nn.Conv2d, (1, 1), (3, 4, 2)),
    "no images": Convolution(nn.Conv2d, (4, 4), (3, 8, 12), batch=0),
    "no blocks": Convolution(nn.Conv3d, (2, 3, 3), (3, 2, 3, 3), batch=0),
}


def operands(name, dtype, others):
    case = CONVOLUTIONS[name]
    channels, *sizes = case.size
    made = {
        "x": torch.randn(case.batch, channels, *sizes).to(dtype),
        "weight": (torch.randn(case.out, channels, *case.kernel) * (channels * 4) ** -0.5).to(others),
    }
    if case.bias:
        made["bias"] = torch.randn(case.out).to(others)
    convolution = case.kind(channels, case.out, case.kernel, stride=case.kernel, bias=case.bias)
    return {"convolution": convolution, **made}


def called(function, convolution, x, *parameters):
    # As plain tensors, so that what is computed has their gradients.
    convolution._parameters.update(zip(("weight", "bias"), parameters, strict=False))
    return function(x, convolution)


CASES = {
    "disjoint_blocks": Case(
        operands,
        sorted(CONVOLUTIONS, key="an image".__ne__),
        rows=("x",),
        call=called,
        kept={"torch": 1},
        rule=called,
    )
}
