"""Tensors that an autograd function saves before it computes.

What a custom function saves, torch packs when its forward is done. A checkpoint recomputes a region only
until the last saved tensor is there again: a function at its end, whose result nobody needs then, would
compute it in vain. So these tensors are saved by a node of their own, in front of the function. What was
recomputed for one backward is read there for the last time: its memory is free (`are_spent`).
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from veomni_hook.kernels.shared.repeated import in_region

__all__ = ["are_spent", "hold", "hold_in_checkpoint", "saved_by"]

# Who refers to a storage, and to what torch has behind a tensor; a torch without these functions shares all.
_COUNTED = hasattr(torch._C, "_storage_Use_Count") and hasattr(torch.Tensor, "_use_count")


class _Held(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor | None) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        return next(tensor for tensor in tensors if tensor is not None).new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: None) -> tuple[None, ...]:
        return (None,) * len(ctx.needs_input_grad)


def hold(*tensors: torch.Tensor | None) -> torch.Tensor:
    """Return a handle of ``tensors``, one of which requires a gradient: an operand of a function.

    The function finds them by `saved_by` of ``handle.grad_fn``, and returns None as the handle's gradient.
    """
    handle: torch.Tensor = _Held.apply(*tensors)  # type: ignore[no-untyped-call]
    return handle


def hold_in_checkpoint(*tensors: torch.Tensor | None) -> torch.Tensor | None:
    """Return the handle of `hold` where a checkpoint runs or repeats its region, else None."""
    return hold(*tensors) if not is_dynamo_compiling() and in_region() else None


def saved_by(node: Any) -> tuple[Any, ...]:
    """Return the tensors that a handle's node holds, for one reading: checkpoints recompute them for it."""
    return tuple(node.saved_tensors)


def are_spent(new: torch.Tensor, *tensors: torch.Tensor) -> bool:
    """Return whether only the caller can read the memory of ``tensors``, which may then hold something else.

    So it is with tensors that a checkpoint has recomputed for this backward, unless somebody kept them.

    Args:
        new: a tensor that the caller has just made. It and ``tensors`` are in one local variable each, and
            the call is a statement of its own: what waits for the result would refer to them, too.
        tensors: those in question.
    """
    if not _COUNTED or is_dynamo_compiling():
        return False
    # As many references as to a new one, whatever Python's own calls add.
    alone, *counts = (
        (
            sys.getrefcount(tensor),
            tensor._use_count(),  # type: ignore[attr-defined]
            torch._C._storage_Use_Count(tensor.untyped_storage()._cdata),
        )
        for tensor in (new, *tensors)
    )
    return all(count == alone for count in counts)
