"""Tensors that are ready while their stream has more to do: work on them need not wait for that.

A backward pass computes several gradients one after the other. The first may already travel to other
processes while the others are computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

__all__ = ["as_soon_as_ready", "note_ready"]

_ATTRIBUTE = "_veomni_ready"
#: Smaller tensors are not noted: an event costs the host some microseconds.
_LEAST = 2**20


@dataclass(frozen=True)
class _Ready:
    """When a tensor is ready, unless it was changed in place since, as autograd does to add to a gradient."""

    event: torch.cuda.Event
    version: int

    def __reduce__(self) -> tuple[object, ...]:
        # A tensor that is saved or copied leaves it behind, and can be loaded with `weights_only`.
        return torch.Size, ((),)


def note_ready(tensor: Tensor | None, *others: Tensor | None) -> None:
    """Note that the tensors are what the current stream was told to compute until now."""
    if tensor is None or not tensor.is_cuda or tensor.numel() < _LEAST:
        return
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    for ready in (tensor, *others):
        if ready is not None:
            setattr(ready, _ATTRIBUTE, _Ready(event, ready._version))


def as_soon_as_ready(function: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """Return ``function(tensor)``, not differentiable, computed on a stream beside if readiness was noted.

    The current stream waits for the result. Without a note, and for a tensor that is not the noted one but
    was computed from it, this is a call.
    """
    noted = getattr(tensor, _ATTRIBUTE, None)
    if not isinstance(noted, _Ready) or noted.version != tensor._version:
        return function(tensor)
    current, beside = torch.cuda.current_stream(tensor.device), _stream(tensor.device)
    beside.wait_event(noted.event)
    with torch.cuda.stream(beside):
        result = function(tensor)
    current.wait_stream(beside)
    # The allocator has it for the stream beside, which could get its memory while this stream reads it.
    result.record_stream(current)
    return result


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
