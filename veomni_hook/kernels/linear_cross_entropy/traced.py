"""A language model's loss under ``torch.compile``, in a form that dynamo traces without a graph break.

The head must be a plain ``nn.Linear`` without hooks: its weight is read, and it is not called.
Logits are computed when read (`output`): by the graph if compiled code reads them, by the head if a caller
reads them from a compiled model's output. The read is not recorded, since compiled code would not check it
again: each read costs the head's product.

What cannot be traced is decided at trace time: checks of loss functions are constants in the graph, active
options a flag that the graph guards on.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.loss import loss_utils

from veomni_hook.kernels.linear_cross_entropy import head as heads
from veomni_hook.kernels.linear_cross_entropy import losses
from veomni_hook.kernels.linear_cross_entropy.call import Call
from veomni_hook.kernels.linear_cross_entropy.deferred import DeferredLogits
from veomni_hook.kernels.linear_cross_entropy.linear_call import LinearCall
from veomni_hook.kernels.linear_cross_entropy.options import OPEN
from veomni_hook.kernels.shared.module_calls import call_is_seen, is_linear
from veomni_hook.kernels.shared.operand_checks import not_plain

__all__ = ["TracedLogits", "loss_function_refuses", "refuses"]

#: Cache that dynamo reads constants from.
_REASONS: dict[Any, str | None] = {}


def refuses(call: Call) -> str | None:
    """Return what, besides the general reasons, prevents tracing this call, or None."""
    if OPEN.any:
        return "compiled code cannot report to loss_options"
    head = call.head
    if not is_linear(type(head)):
        return f"under torch.compile the head must be an nn.Linear, not a {type(head).__name__}"
    seen = call_is_seen(head)
    if seen is not None:
        return f"the head {seen}"
    weights = (head.weight,) if head.bias is None else (head.weight, head.bias)
    return not_plain(*weights) or heads.unsuited(call.hidden_states, head.weight, head.bias)


def loss_function_refuses(loss_function: object) -> str | None:
    """Return why ``loss_function`` is not a known one, or None."""
    if type(loss_function) is not FunctionType:
        return "the model has its own loss_function"
    _examine(loss_function)
    reason = _REASONS[loss_function]
    # Repeated here so that the graph is recompiled if one of the two is replaced.
    part = getattr(loss_utils.fixed_cross_entropy, "__code__", None)
    if reason is None and (
        part is not losses.PARTS.part or functional.cross_entropy is not losses.PARTS.operation
    ):
        return "a function that the loss function calls was replaced"
    return reason


def _examine(loss_function: object) -> bool:
    _REASONS[loss_function] = losses.refuses(loss_function)
    return True


class TracedLogits(DeferredLogits):
    """Logits of a compiled forward that have not been read yet."""

    def __init__(self, head: nn.Linear, call: Call, hidden_states: torch.Tensor) -> None:
        kind = hidden_states.device.type
        self._head = self._linear = head
        self._hidden_states = hidden_states
        self._call = LinearCall(hidden_states, head.weight, head.bias)
        self._weights = self._call.weights
        self._transform = call.transform
        self._grad = True
        self._autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        self._cast = self._moved = None
        # The version of hidden states is meaningless: Inductor reuses memory.
        self._version = self.logits = None

    def compute(self) -> torch.Tensor:
        """Return the logits as the forward would have."""
        if torch.compiler.is_compiling():
            return self._transform(self._head(self._hidden_states))
        return self.rows()

    def unread(self) -> None:
        """Return nothing: an output computes these logits at the first read, and keeps them."""


# See `veomni_hook.kernels.slot.compiled`.
setattr(_examine, "_dynamo_marked_constant", True)  # noqa: B010 - mypy knows no such attribute
