"""Custom autograd functions, called with less of torch's Python code around them."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import compiler as _compiler
from torch.autograd.function import once_differentiable
from torch.compiler import is_dynamo_compiling

__all__ = ["applied", "backward_once"]

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


def backward_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Return `torch.autograd.function.once_differentiable` of ``backward``, which costs less when it may.

    Without gradients enabled, as in nearly every backward pass, there is nothing that it has to do.
    """
    checked = once_differentiable(backward)

    @wraps(backward)
    def run(ctx: Any, *gradients: Any) -> Any:
        return checked(ctx, *gradients) if _grad_enabled() else backward(ctx, *gradients)

    return run
