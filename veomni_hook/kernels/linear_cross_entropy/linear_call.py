"""A call of a head's Linear whose result was not computed: what it would have been, as long as that is known.

The weights are held with the memory that they had. So what happens to the head later (hooks, another weight,
``p.data = ...``, ``model.to(dtype)``, the end of a ``functional_call``) changes nothing. What is written into
that memory is noticed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from veomni_hook.kernels.linear_cross_entropy.sample import differ, sample

__all__ = ["WEIGHTS_CHANGED", "LinearCall"]

WEIGHTS_CHANGED = "the weights of the head have changed"


class LinearCall:
    """``torch.nn.functional.linear(hidden_states, weight, bias)``, plain tensors, to be computed later.

    ``weights`` is a sample of weight and bias.
    """

    def __init__(self, hidden_states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.hidden_states = hidden_states
        self._weight = weight, weight.detach()
        self._bias = None if bias is None else (bias, bias.detach())
        self.weights = sample(weight, bias)

    @property
    def operands(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The weight and the bias that were passed."""
        return self._weight[0], None if self._bias is None else self._bias[0]

    @property
    def is_released(self) -> bool:
        """Whether the memory of weight or bias was released."""
        return any(pair is not None and _is_released(pair[1]) for pair in (self._weight, self._bias))

    def result(self, hidden_states: torch.Tensor | None = None) -> tuple[torch.Tensor, str | None] | None:
        """Return the result, and why it may not be what it was, or None; None: the memory was released.

        ``hidden_states``: a selection of the call's; None: all.
        """
        if self.is_released:
            return None
        weight, bias = self._weight[1], None if self._bias is None else self._bias[1]
        changed = WEIGHTS_CHANGED if differ(self.weights, weight, bias) else None
        product = functional.linear(
            self.hidden_states if hidden_states is None else hidden_states,
            _as_it_was(*self._weight),
            None if self._bias is None else _as_it_was(*self._bias),
        )
        return product, changed


def _is_released(tensor: torch.Tensor) -> bool:
    """Whether FSDP has released the memory of a gathered tensor."""
    return tensor.untyped_storage().nbytes() < tensor.nbytes


def _as_it_was(tensor: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` with the data ``held`` that it had."""
    same = tensor.dtype is held.dtype and tensor.device == held.device and tensor.shape == held.shape
    if same and tensor.stride() == held.stride() and tensor.data_ptr() == held.data_ptr():
        return tensor
    restored: torch.Tensor = _Restored.apply(tensor, held)  # type: ignore[no-untyped-call]
    return restored


class _Restored(torch.autograd.Function):
    """Data that a tensor had; the gradient is the tensor's."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
        return held.view_as(held)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None
