"""Tells from a sample of a head's weights whether they have changed since a forward.

A tensor's version is not enough: a fused optimizer, ``p.data`` and a new Parameter leave it unchanged, and
sharded weights are gathered into new tensors each time. Small weights are compared as a whole. For others,
the sample has at least one number from every row, and from every column if there are at least as many rows
as columns. It detects an optimizer step, but may miss a change of a few single numbers in a large weight.
For 151,936 rows in bfloat16 it copies 300 KB.
"""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

import torch

__all__ = ["Sample", "differ", "sample"]

_WHOLE = 1 << 18
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Sample(NamedTuple):
    """Sampled numbers of a weight and its bias, and the weight's shape."""

    shape: tuple[int, ...]
    weight: torch.Tensor
    bias: torch.Tensor | None


def sample(weight: torch.Tensor, bias: torch.Tensor | None) -> Sample:
    """Return a sample of a weight ``[rows, columns]`` and of its bias, both plain tensors."""
    taken = None if bias is None else bias.detach().clone()
    return Sample(tuple(weight.shape), _taken(weight.detach()).clone(), taken)


def differ(before: Sample, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether a weight or its bias, both plain tensors, have changed."""
    if tuple(weight.shape) != before.shape or (bias is None) != (before.bias is None):
        return True
    if not _equal(before.weight, _taken(weight.detach())):
        return True
    return bias is not None and before.bias is not None and not _equal(before.bias, bias.detach())


def _taken(weight: torch.Tensor) -> torch.Tensor:
    if not weight.is_contiguous():
        # A column and a row, to avoid a copy of the whole weight.
        return torch.cat([weight[:, 0], weight[0]]) if weight.numel() > _WHOLE else weight.reshape(-1)
    step = 1
    if weight.numel() > _WHOLE:
        # A step below the row length that shares no factor with it reaches every column.
        step = min(weight.shape) - 1
        while gcd(step, weight.shape[1]) > 1:
            step -= 1
    return weight.view(-1)[:: max(step, 1)]


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether bits are equal, so that NaN equals NaN."""
    if one.dtype is not other.dtype:
        return False
    bits = _BITS[one.element_size()]
    return torch.equal(one.contiguous().view(bits), other.contiguous().view(bits).to(one.device))
