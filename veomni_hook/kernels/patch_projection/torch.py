"""A convolution whose stride is its kernel as one product of torch's, forward and backward by autograd.

Forward:  y = rows W^T + bias
Shapes: rows ``[batch * blocks, channels * kernel]``, W ``[out, channels * kernel]``, y the result's
Saved: the rows if the weight needs a gradient, W if the input does.
Mutates: nothing.

If the input is contiguous and has the kernel's size, the rows are a view of it, and no copy is made.
Otherwise they are one copy. So is y where it has several blocks, because torch's convolution returns a
contiguous result, which code after it may rely on.
"""

from __future__ import annotations

from math import prod

import torch
from torch import nn
from torch.nn import functional

from veomni_hook.kernels.shared.module_calls import parameter

__all__ = ["disjoint_blocks"]

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def disjoint_blocks(x: torch.Tensor, convolution: nn.Conv1d | nn.Conv2d | nn.Conv3d) -> torch.Tensor:
    """Return ``convolution(x)`` for x ``[batch, channels, *sizes]``: ``[batch, out, *blocks]``.

    `veomni_hook.kernels.patch_projection.rules.refuses` has accepted both. The result is contiguous, or
    channels-last where x or the weight is.
    """
    weight, bias = parameter(convolution, "weight"), parameter(convolution, "bias")
    out = weight.shape[0]
    blocks = [size // width for size, width in zip(x.shape[2:], convolution.kernel_size, strict=True)]
    y = functional.linear(_rows(x, blocks, convolution.kernel_size), weight.reshape(out, -1), bias)
    y = y.view(x.shape[0], *blocks, out).movedim(-1, 1)
    return y if _channels_last(x) or _channels_last(weight) else y.contiguous()


def _rows(x: torch.Tensor, blocks: list[int], kernel: tuple[int, ...]) -> torch.Tensor:
    """Return the values of each block as a row, in the order of the weight's."""
    shape = x.shape[0] * prod(blocks), x.shape[1] * prod(kernel)
    for dimension in reversed(range(len(kernel))):
        count, width = blocks[dimension], kernel[dimension]
        before, after = x.shape[: 2 + dimension], x.shape[3 + dimension :]
        x = x.narrow(2 + dimension, 0, count * width).view(*before, count, width, *after)
    # x is [batch, channels, blocks, kernel, blocks, kernel, ...].
    return x.permute(0, *range(2, x.ndim, 2), 1, *range(3, x.ndim, 2)).reshape(shape)


def _channels_last(x: torch.Tensor) -> bool:
    memory_format = _CHANNELS_LAST.get(x.ndim)
    return (
        memory_format is not None and not x.is_contiguous() and x.is_contiguous(memory_format=memory_format)
    )
