"""Linear layers that multiply rounded operands, in the two shapes that libraries give them.

``module``: a subclass of ``nn.Linear`` with a ``forward`` of its own (torchao's ``Float8Linear``). ``weight``: an
``nn.Linear`` whose weight is a tensor subclass that computes products itself (torchao's prototype for experts and
MXFP8). ``torchao``: the real ``Float8Linear``, emulated. Scales depend on all rows of a tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree

KINDS = ("module", "weight", "torchao")
#: Half as many as there are values of a rounded tensor: few, so that rounding shows.
LEVELS = 7
#: What is done to weights before a product.
_KEEPS_CLASS = {
    torch.ops.aten.detach.default,
    torch.ops.aten.select.int,
    torch.ops.aten.t.default,
    torch.ops.aten.transpose.int,
    torch.ops.aten.view.default,
}


def rounded(x: Tensor) -> Tensor:
    """Return ``x`` in multiples of its largest number's fraction."""
    step = x.abs().max().clamp(min=1e-12) / LEVELS
    return (x / step).round() * step


class _Product(torch.autograd.Function):
    """``x @ weight.t()`` that keeps both operands and rounds what it multiplies."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return rounded(x) @ rounded(_data(weight)).t()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        dy = rounded(dy)
        dweight = dy.flatten(0, -2).t() @ rounded(x).flatten(0, -2)
        return dy @ rounded(_data(weight)), dweight


def _data(weight: Tensor) -> Tensor:
    return weight._data if isinstance(weight, RoundedWeight) else weight


class RoundedLinear(nn.Linear):
    """An ``nn.Linear`` with another forward."""

    def forward(self, x: Tensor) -> Tensor:
        y = _Product.apply(x, self.weight)
        return y if self.bias is None else y + self.bias


class RoundedWeight(Tensor):
    """A weight that takes over the products that it is an operand of, and is itself no memory to read."""

    _data: Tensor

    @staticmethod
    def __new__(cls, data: Tensor) -> RoundedWeight:
        return torch.Tensor._make_wrapper_subclass(
            cls, data.shape, strides=data.stride(), dtype=data.dtype, device=data.device
        )

    def __init__(self, data: Tensor) -> None:
        self._data = data

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.linear:
            x, weight, bias, *_ = (*args, kwargs.get("bias"))
            y = _Product.apply(x, weight)
            return y if bias is None else y + bias
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = _pytree.tree_map_only(RoundedWeight, _data, (args, kwargs or {}))
        found = func(*plain[0], **plain[1])
        return RoundedWeight(found) if func in _KEEPS_CLASS else found


def wrap(module: nn.Module, name: str) -> None:
    """Make the parameter ``name`` of ``module`` one that rounds."""
    setattr(module, name, nn.Parameter(RoundedWeight(getattr(module, name).detach())))


def convert(model: nn.Module, kind: str, taken: Callable[[str], bool] = lambda name: True) -> nn.Module:
    """Make the Linear layers of ``model`` whose names are ``taken`` ones that round, in place.

    Skips the test where ``kind`` is a library that is not installed.
    """
    if kind == "torchao":
        library = pytest.importorskip("torchao.float8")
        return library.convert_to_float8_training(
            model,
            # Emulated: a GPU's products need multiples of 16 tokens.
            config=library.Float8LinearConfig(emulate=True),
            module_filter_fn=lambda module, name: taken(name),
        )
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and taken(name):
            if kind == "module":
                module.__class__ = RoundedLinear
            else:
                wrap(module, "weight")
    return model
