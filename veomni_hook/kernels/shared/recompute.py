"""A formula in plain PyTorch whose backward recomputes it, so that only its operands are saved.

Autograd saves what every operation of a formula needs: for a bfloat16 RMSNorm two tensors in float32 and one
in bfloat16, where the operand would be enough. Results, gradients and second derivatives are bitwise equal to
the formula's. `torch.utils.checkpoint` does the same but takes several times as much host time per call,
which matters for ops of some ten microseconds.

Mutates: nothing. Saved: the operands.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch

from veomni_hook.kernels.selection.registry import load_attribute
from veomni_hook.kernels.shared.autograd import gradients
from veomni_hook.kernels.shared.operand_checks import not_plain, untraceable, wants_grad

__all__ = ["computed_again", "recomputed", "refuses"]

_Result = TypeVar("_Result", torch.Tensor, tuple[torch.Tensor, ...])


class _ComputedAgain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, formula: Callable[..., Any], *operands: Any) -> Any:
        ctx.save_for_backward(
            *(operand if isinstance(operand, torch.Tensor) else None for operand in operands)
        )
        ctx.others = [None if isinstance(operand, torch.Tensor) else operand for operand in operands]
        ctx.formula = formula
        ctx.device = next(operand.device.type for operand in operands if isinstance(operand, torch.Tensor))
        ctx.autocast = torch.is_autocast_enabled(ctx.device), torch.get_autocast_dtype(ctx.device)
        return formula(*operands)

    @staticmethod
    def backward(ctx: Any, *incoming: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        operands = [
            other if tensor is None else tensor
            for tensor, other in zip(ctx.saved_tensors, ctx.others, strict=True)
        ]
        enabled, dtype = ctx.autocast
        within = torch.autocast(ctx.device, dtype=dtype, enabled=enabled)
        return None, *gradients(ctx.formula, operands, ctx.needs_input_grad[1:], incoming, within)


def computed_again(formula: Callable[..., _Result], *operands: Any) -> _Result:
    """Return ``formula(*operands)``; if a gradient is needed, its backward recomputes the formula.

    The result, a tensor or a tuple of tensors, must be neither an operand nor a view of one. It must depend
    on every tensor among the operands and on no other tensor that requires grad.
    """
    # A compiler decides for itself what to save and what to recompute.
    tensors = [operand for operand in operands if isinstance(operand, torch.Tensor)]
    if torch.compiler.is_compiling() or not wants_grad(*tensors):
        return formula(*operands)
    return _ComputedAgain.apply(formula, *operands)  # type: ignore[no-untyped-call,no-any-return]


@cache
def recomputed(reference: str) -> Callable[..., Any]:
    """Return `computed_again` of the formula that a code reference names, whose operands have no defaults."""
    formula = load_attribute(reference)
    names = (*inspect.signature(formula).parameters,)

    def kernel(*operands: Any, **named: Any) -> Any:
        if named:  # as in a guard where upstream evaluates operands in another order
            operands += tuple(named[name] for name in names[len(operands) :])
        return computed_again(formula, *operands)

    return kernel


def refuses(owner: Any, *operands: Any) -> str | None:
    """Return why this call must run the upstream code, or None."""
    return not_plain(*(operand for operand in operands if isinstance(operand, torch.Tensor))) or untraceable()
