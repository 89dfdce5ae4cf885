"""Tensors that behave like any other, except as the input of ``torch.nn.functional.linear``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils import _pytree

from veomni_hook.kernels.shared.operand_checks import not_plain

__all__ = ["LinearInput", "plain", "replaceable"]


class LinearInput(Tensor):
    """The input of a product that a class computes in a way of its own.

    All other operations use the plain tensor and return plain tensors.

    Attributes:
        linear: ``(x, weight, bias)`` -> the product, or None where torch's function has to compute it.
    """

    linear: ClassVar[Callable[..., Tensor | None]]

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if not all(issubclass(kind, cls) for kind in types):
            # Let another tensor subclass (a quantised weight) handle the call.
            args, kwargs = _pytree.tree_map_only(cls, plain, (args, kwargs or {}))
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            if func is functional.linear and args and isinstance(args[0], cls):
                arguments = {**dict(zip(("input", "weight", "bias"), args, strict=False)), **(kwargs or {})}
                y = cls.linear(arguments["input"], arguments["weight"], arguments.get("bias"))
                if y is not None:
                    return y
            return func(*args, **(kwargs or {}))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return plain(self).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def plain(x: Tensor) -> Tensor:
    """Return ``x`` as a tensor of no subclass."""
    return x.as_subclass(Tensor)


def replaceable(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Return whether an operator may take the place of ``functional.linear`` for these operands."""
    return (
        not_plain(weight, *(() if bias is None else (bias,))) is None
        and weight.dtype is x.dtype
        and weight.ndim == 2
        and not torch.is_autocast_enabled(x.device.type)
    )
