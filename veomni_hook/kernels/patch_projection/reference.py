"""What a convolution whose stride is its kernel computes, without an operator of convolution."""

from __future__ import annotations

import torch
from torch import nn


def disjoint_blocks(x: torch.Tensor, convolution: nn.Conv1d | nn.Conv2d | nn.Conv3d) -> torch.Tensor:
    """Return ``convolution(x)`` for x ``[batch, channels, *sizes]``: ``[batch, out, *blocks]``.

    A block is as large as the kernel; values after the last whole block of a dimension count for nothing.
    """
    kernel, weight = convolution.kernel_size, convolution.weight
    sizes = range(2, x.ndim)
    for dimension, width in zip(sizes, kernel, strict=True):
        x = x.unfold(dimension, width, width)
    # x is [batch, channels, *blocks, *kernel].
    inner = [1, *range(x.ndim - len(kernel), x.ndim)]
    y: torch.Tensor = torch.tensordot(x, weight, (inner, [1, *sizes]))
    if convolution.bias is not None:
        y = y + convolution.bias.to(y.dtype)
    return y.movedim(-1, 1)
