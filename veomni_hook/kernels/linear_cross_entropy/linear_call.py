"""A call of a head's Linear whose result was not computed: what it would have been, as long as that is known.

The weights are held with the memory that they had. So what happens to the head later (hooks, another weight,
``p.data = ...``, ``model.to(dtype)``, the end of a ``functional_call``) changes nothing. What is written into
that memory is noticed.

A tensor's version does not tell whether weights have changed: a fused optimizer, ``p.data`` and a new
Parameter leave it as it is, and sharded weights are gathered into new tensors each time. So numbers are
compared: of small weights all, of others a sample with at least one number from every row, and from every
column if there are at least as many rows as columns. It detects an optimizer step, but may miss a change of a
few single numbers in a large weight. For 151,936 rows in bfloat16 it copies 300 KB.
"""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

import torch
from torch.nn import functional

__all__ = ["WEIGHTS_CHANGED", "LinearCall", "Sample", "differ", "sample"]

WEIGHTS_CHANGED = "the weights of the head have changed"
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


class LinearCall:
    """``torch.nn.functional.linear(hidden_states, weight, bias)``, plain tensors, to be computed later.

    ``operands`` are the weight and the bias that were passed, ``weights`` a sample of both.
    """

    def __init__(self, hidden_states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.hidden_states = hidden_states
        self.operands = weight, bias
        self._data = weight.detach(), None if bias is None else bias.detach()
        self.weights = sample(weight, bias)

    @property
    def is_released(self) -> bool:
        """Whether FSDP has released the memory of a gathered weight or bias."""
        held = (data for data in self._data if data is not None)
        return any(data.untyped_storage().nbytes() < data.nbytes for data in held)

    def result(self, hidden_states: torch.Tensor | None = None) -> tuple[torch.Tensor, str | None] | None:
        """Return the result, and why it may not be what it was, or None; None: the memory was released.

        ``hidden_states``: a selection of the call's; None: all.
        """
        if self.is_released:
            return None
        changed = WEIGHTS_CHANGED if differ(self.weights, *self._data) else None
        (weight, bias), (of_weight, of_bias) = self.operands, self._data
        product = functional.linear(
            self.hidden_states if hidden_states is None else hidden_states,
            _as_it_was(weight, of_weight),
            None if bias is None or of_bias is None else _as_it_was(bias, of_bias),
        )
        return product, changed


def _as_it_was(tensor: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` with the data ``anchor`` that it had."""
    same = tensor.dtype is anchor.dtype and tensor.device == anchor.device and tensor.shape == anchor.shape
    if same and tensor.stride() == anchor.stride() and tensor.data_ptr() == anchor.data_ptr():
        return tensor
    restored: torch.Tensor = _Restored.apply(tensor, anchor)  # type: ignore[no-untyped-call]
    return restored


class _Restored(torch.autograd.Function):
    """Data that a tensor had; the gradient is the tensor's."""

    @staticmethod
    def forward(ctx: object, tensor: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        return anchor.view_as(anchor)

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None
