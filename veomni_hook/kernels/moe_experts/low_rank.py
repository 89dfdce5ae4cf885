"""Weights of experts with low-rank adapters, whose sum is formed only where somebody reads it.

A weight W [E, d1, d2] with an adapter stands for ``W + scale * left @ right``. Kernels multiply with the
three parts instead: ``x (W + s B A)' = x W' + s (x A') B'``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from veomni_hook.errors import KernelError

__all__ = [
    "NO_ADAPTERS",
    "AdaptedWeight",
    "Adapters",
    "Factors",
    "Part",
    "adapters_of",
    "is_adapted",
    "padded",
    "without_adapters",
]


class Part(NamedTuple):
    """An adapter of a weight [E, d1, d2]: ``scale * left @ right``.

    Attributes:
        left: ``[E, d1, r]``.
        right: ``[E, r, d2]``.
        scale: a number.
    """

    left: Tensor
    right: Tensor
    scale: float


class Factors(NamedTuple):
    """An adapter of a product: ``scale * (x into_e') out_e'``, ``into`` [E, r, in], ``out`` [E, out, r]."""

    into: Tensor
    out: Tensor
    scale: float


class Adapters(NamedTuple):
    """The adapters of a call's two products; factors are None where a product has none.

    Attributes:
        up_into: ``[E, r, hidden]``, of the first product; factors have any strides and any float dtype.
        up_out: ``[E, width, r]``.
        down_into: ``[E, s, inner]``, of the second product.
        down_out: ``[E, hidden, s]``.
        up_scale: the factor of the first product's adapter.
        down_scale: that of the second one's.
    """

    up_into: Tensor | None
    up_out: Tensor | None
    down_into: Tensor | None
    down_out: Tensor | None
    up_scale: float
    down_scale: float

    @property
    def factors(self) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """The tensors, in their order."""
        return self.up_into, self.up_out, self.down_into, self.down_out

    @property
    def up(self) -> Factors | None:
        """The adapter of the first product."""
        if self.up_into is None or self.up_out is None:
            return None
        return Factors(self.up_into, self.up_out, self.up_scale)

    @property
    def down(self) -> Factors | None:
        """The adapter of the second product."""
        if self.down_into is None or self.down_out is None:
            return None
        return Factors(self.down_into, self.down_out, self.down_scale)


NO_ADAPTERS = Adapters(None, None, None, None, 0.0, 0.0)


class AdaptedWeight(Tensor):
    """A weight with adapters, for as long as they are active.

    Kernels that know it take it apart. To every other function of torch it is the sum, which `total` computes
    once. Its shape, dtype and device are known without the sum.

    Args:
        weight: the weight alone, a plain tensor.
        parts: its adapters.
        add: called for the sum.
    """

    weight: Tensor
    parts: tuple[Part, ...]
    _add: Callable[[], Tensor]
    _sums: dict[bool, Tensor]

    def __new__(cls, weight: Tensor, parts: tuple[Part, ...], add: Callable[[], Tensor]) -> AdaptedWeight:
        """Return a tensor without memory of its own."""
        self: AdaptedWeight = Tensor._make_wrapper_subclass(
            cls, weight.shape, strides=weight.stride(), dtype=weight.dtype, device=weight.device
        )
        self.weight, self.parts = weight, parts
        self._add, self._sums = add, {}
        return self

    def __init__(self, weight: Tensor, parts: tuple[Part, ...], add: Callable[[], Tensor]) -> None:
        super().__init__()

    @property
    def rank(self) -> int:
        """The rank of all adapters together."""
        return sum(part.left.shape[2] for part in self.parts)

    def total(self) -> Tensor:
        """Return the sum, as PEFT computes it; differentiable."""
        key = torch.is_grad_enabled()
        sums = self._sums.get(key)
        if sums is None:
            sums = self._sums[key] = self._add()
        return sums

    @classmethod
    def __torch_function__(
        cls, function: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function in _OF_SHAPE:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))
        args, kwargs = tree_map_only(AdaptedWeight, AdaptedWeight.total, (args, kwargs or {}))
        return function(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        function: object,
        kinds: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> Any:
        # Here, autograd has been passed: a sum would lose the adapters' gradients.
        raise KernelError(
            f"{function} reads an expert's weight with an adapter below autograd",
            where="veomni_hook.kernels.moe_experts.low_rank",
            fix="select upstream's code with VEOMNI_KERNELS=moe_experts=eager, and report this",
        )


#: What is known without the sum. ``__get__`` reads an attribute.
_OF_SHAPE = frozenset(
    [
        *(
            getattr(Tensor, name).__get__
            for name in (
                "shape",
                "dtype",
                "device",
                "ndim",
                "layout",
                "is_cuda",
                "is_cpu",
                "is_meta",
                "itemsize",
            )
        ),
        *(
            getattr(Tensor, name)
            for name in ("size", "stride", "dim", "numel", "element_size", "is_floating_point", "__len__")
        ),
    ]
)


def is_adapted(operands: Sequence[object]) -> bool:
    """Return whether a weight among the operands of a variant's reference has adapters."""
    return AdaptedWeight in map(type, operands)


def without_adapters(operands: Sequence[object]) -> list[Any]:
    """Return the operands with weights alone."""
    return [operand.weight if type(operand) is AdaptedWeight else operand for operand in operands]


def adapters_of(up: object, down: object, *, transposed: bool) -> Adapters:
    """Return the adapters of two weights [E, out, in], or [E, in, out] if ``transposed``, if any."""
    up_into, up_out, up_scale = _factors(up, transposed=transposed)
    down_into, down_out, down_scale = _factors(down, transposed=transposed)
    return Adapters(up_into, up_out, down_into, down_out, up_scale, down_scale)


def _factors(weight: object, *, transposed: bool) -> tuple[Tensor | None, Tensor | None, float]:
    if type(weight) is not AdaptedWeight:
        return None, None, 0.0
    left, right, scale = weight.parts[0]
    if len(weight.parts) > 1:  # as one, whose rank is the sum of theirs
        left = torch.cat([part.left * part.scale for part in weight.parts], dim=2)
        right, scale = torch.cat([part.right for part in weight.parts], dim=1), 1.0
    if transposed:
        return left.transpose(1, 2), right.transpose(1, 2), scale
    return right, left, scale


def padded(factors: Factors, dtype: torch.dtype, multiple: int) -> tuple[Tensor, Tensor]:
    """Return contiguous copies in ``dtype`` whose rank is a multiple of a number, with zeros added."""
    into, out, _ = factors
    rank = into.shape[1]
    added = -rank % multiple
    copies = (
        into.new_empty(into.shape[0], rank + added, into.shape[2], dtype=dtype),
        out.new_empty(*out.shape[:2], rank + added, dtype=dtype),
    )
    copies[0][:, :rank].copy_(into)
    copies[1][..., :rank].copy_(out)
    if added:
        copies[0][:, rank:].zero_()
        copies[1][..., rank:].zero_()
    return copies
