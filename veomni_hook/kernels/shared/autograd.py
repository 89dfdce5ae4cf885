"""Custom autograd functions: called with less of torch's Python code around them, and differentiated again.

A kernel's backward computes numbers. A backward pass that is itself recorded (``create_graph``) needs a
function of the operands and of the incoming gradients: there, `gradients` differentiates the op's formula.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType, new_class
from typing import Any

import torch
from torch import compiler as _compiler
from torch.compiler import is_dynamo_compiling

from veomni_hook.errors import KernelError
from veomni_hook.kernels.shared.operand_checks import wants_grad

__all__ = ["applied", "differentiable", "differentiated_once", "gradients", "is_recorded", "with_formula"]

_grad_enabled = torch.is_grad_enabled
_in_functorch = torch._C._are_functorch_transforms_active
#: Tensors that left a transform of `torch.func` need what `torch.autograd.Function.apply` does.
_is_wrapped: Callable[[torch.Tensor], bool] | None = getattr(
    torch._C._functorch, "is_functorch_wrapped_tensor", None
)


def applied(function: type[torch.autograd.Function], data: int = 0) -> Callable[..., Any]:
    """Return ``function.apply`` for calls with positional arguments.

    ``Function.apply`` looks at its class and at every argument before it enters C++: a third of the time of
    an empty function. Where that changes nothing, the function that it ends in is called.

    Args:
        function: it has no ``setup_context``.
        data: the number of an argument that is a tensor computed by the model, if any is.
    """
    apply: Callable[..., Any] = function.apply
    direct: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    if _is_wrapped is None:
        return apply
    is_wrapped = _is_wrapped

    def call(*arguments: Any) -> Any:
        if (
            is_dynamo_compiling()
            or _compiler._is_compiling_flag
            or _in_functorch()
            or is_wrapped(arguments[data])
        ):
            return apply(*arguments)
        return direct(*arguments)

    return call


def differentiable(
    forward: Callable[..., Any],
    backward: Callable[..., Sequence[torch.Tensor | None]],
    formula: Callable[..., Any] | None,
    *,
    tensors: int,
    results: int = 1,
    addends: int = 1,
    unread: int = 0,
    reread: Sequence[int] = (),
    sparse: bool = False,
    direct: Mapping[str, Any] = MappingProxyType({}),
) -> Callable[..., Any]:
    """Return an op of positional operands, with gradients where one is needed.

    Args:
        forward: ``(*operands)`` -> a result, or results and then what else the backward needs.
        backward: ``(saved, rest, wanted, *incoming)`` -> the gradients of the first ``tensors`` operands.
            ``saved`` are these operands and what else the forward saved, ``rest`` the other operands. It may
            return anything for a gradient that is not wanted.
        formula: ``(*operands)`` -> the results by definition. A recorded backward differentiates it; None if
            the op is linear.
        tensors: how many operands, the first ones, are tensors or None. No other operand has a gradient.
        results: how many results of the forward the op returns.
        addends: how many operands, the first ones, stand for their sum alone. If more than one, the sum is
            the first result, and takes their place in ``saved``, in ``wanted`` and before the formula.
        unread: how many operands, the first ones, the backward does not read: the op is linear in those that
            have a gradient. They are not saved: ``saved`` has None in their place. Such a backward is
            differentiable itself, and runs where it is recorded, too.
        reread: which results the backward reads: in ``saved``, behind the operands.
        sparse: whether the gradient of an unused result is None instead of zeros.
        direct: keyword arguments of the forward where nothing needs a gradient.
    """

    unsaved, replaced = (None,) * unread, max(unread, addends)

    def run_forward(ctx: Any, *operands: Any) -> Any:
        computed = forward(*operands)
        computed = computed if type(computed) is tuple else (computed,)
        # What stands for the first operands: nothing, the operand, or the sum.
        first = unsaved or (operands[0] if addends == 1 else computed[0],)
        kept = computed[results:] if not reread else (*map(computed.__getitem__, reread), *computed[results:])
        ctx.save_for_backward(*first, *operands[replaced:tensors], *kept)
        ctx.rest = operands[tensors:]
        if sparse:
            ctx.set_materialize_grads(False)
        return computed[0] if results == 1 else computed[:results]

    def run_backward(ctx: Any, *incoming: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        # Read once: activation checkpointing recomputes them for one reading.
        saved, rest, needed = ctx.saved_tensors, ctx.rest, ctx.needs_input_grad[:tensors]
        wanted = needed if addends == 1 else (any(needed[:addends]), *needed[addends:])
        if formula is not None and is_recorded():
            slopes: Sequence[Any] = gradients(
                lambda *tensors: formula(*tensors, *rest), saved[: len(wanted)], wanted, incoming
            )
        else:
            slopes = backward(saved, rest, wanted, *incoming)
        slopes = slopes if addends == 1 else (*[slopes[0]] * addends, *slopes[1:])
        slopes = [slope if need else None for slope, need in zip(slopes, needed, strict=True)]
        return *slopes, *[None] * len(rest)

    methods = {"forward": staticmethod(run_forward), "backward": staticmethod(run_backward)}
    # Profilers and graphs show this name.
    name = forward.__name__.title().replace("_", "")
    apply = applied(new_class(name, (torch.autograd.Function,), exec_body=lambda body: body.update(methods)))

    def op(*operands: Any) -> Any:
        if _grad_enabled():
            for x in operands[:tensors]:
                if x is not None and x.requires_grad:
                    return apply(*operands)
        computed = forward(*operands, **direct)
        if type(computed) is not tuple:
            return computed
        return computed[0] if results == 1 else computed[:results]

    return op


def is_recorded() -> bool:
    """Return whether the backward pass that runs now is recorded, so that its results need a history.

    A compiler traces a backward as code that runs once.
    """
    return _grad_enabled() and not (is_dynamo_compiling() or _compiler._is_compiling_flag)


def gradients(
    formula: Callable[..., Any],
    operands: Sequence[Any],
    wanted: Sequence[bool],
    incoming: Sequence[torch.Tensor | None],
    within: AbstractContextManager[Any] | None = None,
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of ``formula(*operands)``, differentiable if the backward pass is recorded.

    The formula sees every operand without its history. So where one operand depends on another, or one
    tensor stands in two places, each gets its own gradient, and the graph outside adds up the paths.

    Args:
        formula: returns a tensor, or a sequence of tensors and None.
        operands: tensors, None and others.
        wanted: for each operand, whether its gradient is wanted. Only those of tensors are.
        incoming: for each tensor that the formula returns, the gradient of the loss, or None for zero.
        within: the context in which the formula runs, such as the forward's autocast.

    Returns:
        For each operand its gradient; None if it is not wanted, or if the formula does not depend on it.
    """
    again = _grad_enabled()
    # A view is a tensor of its own in the graph, and keeps the history.
    operands = [
        x if not want else x.view_as(x) if again else x.detach().requires_grad_()
        for x, want in zip(operands, wanted, strict=True)
    ]
    with torch.enable_grad(), within or nullcontext():
        results = formula(*operands)
    results = (results,) if isinstance(results, torch.Tensor) else results
    ends = [
        (y, dy)
        for y, dy in zip(results, incoming, strict=True)
        if dy is not None and y is not None and y.requires_grad
    ]
    leaves = [x for x, want in zip(operands, wanted, strict=True) if want]
    if not ends or not leaves:
        return (None,) * len(operands)
    slopes = iter(
        torch.autograd.grad(
            [y for y, _ in ends], leaves, [dy for _, dy in ends], create_graph=again, allow_unused=True
        )
    )
    return tuple(next(slopes) if want else None for want in wanted)


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernel: str, result: torch.Tensor) -> torch.Tensor:
        ctx.kernel = kernel
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, incoming: torch.Tensor) -> tuple[None, torch.Tensor]:
        if is_recorded():
            op = ctx.kernel.partition("=")[0]
            raise KernelError(
                "this kernel has no derivative of its gradients, and the backward pass has create_graph=True",
                where=ctx.kernel,
                fix=f"choose {op}=eager, or a kernel of this package",
            )
        return None, incoming


def differentiated_once(kernel: str, result: torch.Tensor) -> torch.Tensor:
    """Return ``result`` of other code, such as ``gated_mlp=liger``, that is differentiable once.

    Such code would give wrong numbers in silence. Here, a recorded backward raises KernelError.
    """
    if not result.requires_grad or _compiler.is_compiling():
        return result
    once: torch.Tensor = _Once.apply(kernel, result)  # type: ignore[no-untyped-call]
    return once


class _Before(torch.autograd.Function):
    """In front of code that is differentiable once: what a recorded backward makes of it ends here."""

    @staticmethod
    def forward(ctx: Any, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(x.view_as(x) for x in operands)

    @staticmethod
    def backward(ctx: Any, *incoming: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (None,) * len(incoming) if is_recorded() else incoming


class _Behind(torch.autograd.Function):
    """Behind this code: a recorded backward goes through the formula instead."""

    @staticmethod
    def forward(
        ctx: Any, formula: Callable[..., Any], result: torch.Tensor, *operands: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.formula = formula
        ctx.save_for_backward(*operands)
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, incoming: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        needed = ctx.needs_input_grad[2:]
        if not is_recorded():
            return None, incoming, *(None for _ in needed)
        return None, None, *gradients(ctx.formula, ctx.saved_tensors, needed, (incoming,))


def with_formula(
    kernel: Callable[..., torch.Tensor],
    formula: Callable[..., torch.Tensor],
    operands: Sequence[torch.Tensor],
    *read: torch.Tensor | None,
) -> torch.Tensor:
    """Return ``kernel(*operands)`` of other code, which is differentiable once.

    A recorded backward differentiates ``formula(*operands, *read)`` instead, any number of times. It still
    runs the other code's backward, and drops the result: that code may not write to its operands.
    """
    if _compiler.is_compiling() or not wants_grad(*operands):
        return kernel(*operands)
    apart = _Before.apply(*operands)  # type: ignore[no-untyped-call]
    result: torch.Tensor = _Behind.apply(formula, kernel(*apart), *operands, *read)  # type: ignore[no-untyped-call]
    return result
