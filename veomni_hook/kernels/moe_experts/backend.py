"""What a backend of experts is: a forward and a backward, and what passes between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

__all__ = ["Backend", "Gradients", "Needed"]


class Needed(NamedTuple):
    """Which gradients to compute; the names are those of `Operands` and `Adapters`."""

    hidden_states: bool
    top_k_weights: bool
    up: bool
    up_bias: bool
    down: bool
    down_bias: bool
    up_into: bool = False
    up_out: bool = False
    down_into: bool = False
    down_out: bool = False


class Gradients(NamedTuple):
    """Gradients of what is differentiable; those that are not needed may have any content."""

    hidden_states: Tensor | None
    top_k_weights: Tensor | None
    up: Tensor | None
    up_bias: Tensor | None
    down: Tensor | None
    down_bias: Tensor | None
    up_into: Tensor | None = None
    up_out: Tensor | None = None
    down_into: Tensor | None = None
    down_out: Tensor | None = None


class Backend(NamedTuple):
    """A backend's two functions, called with autocast off.

    Attributes:
        forward: ``(operands, adapters, form, *, keep) -> (result, kept)``: the result ``[tokens, hidden]`` in
            the dtype of the hidden states; ``kept`` is a tuple of tensors for backward, which may be empty
            unless ``keep``.
        backward: ``(grad, operands, adapters, kept, form, needed) -> Gradients``, of the operands' shapes, in
            any dtype.
        spends: ``backward`` may overwrite ``kept``, unless it is traced. If called again (retained graph), it
            gets an empty tuple instead.
        adapted: the same for weights with adapters; None if the backend refuses these.
    """

    forward: Callable[..., tuple[Tensor, tuple[Tensor, ...]]]
    backward: Callable[..., Gradients]
    spends: bool = False
    adapted: Backend | None = None
