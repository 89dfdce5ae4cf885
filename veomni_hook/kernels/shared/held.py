"""Tensors that an autograd function saves before it computes.

What a custom function saves, torch packs when its forward is done. A checkpoint recomputes a region only
until the last saved tensor is there again: a function at its end, whose result nobody needs then, would
compute it in vain. So these tensors are saved by a node of their own, in front of the function.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from veomni_hook.kernels.shared.repeated import in_region

__all__ = ["hold", "hold_in_checkpoint", "saved_by"]


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
