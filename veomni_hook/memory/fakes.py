"""A model's code on tensors without data: what it allocates, and when, is that of the real step.

Weights and activations are fake tensors. Numbers that code reads, such as positions, token ids and chosen
experts, are real where they are known: integers that come from integers, or from a constructor. Integers
that follow from activations are those of random ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from types import new_class
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from veomni_hook.kernels.shared.changed import changed
from veomni_hook.kernels.shared.operand_checks import count_as_plain, counted_as_plain, counts_as_plain
from veomni_hook.kernels.shared.operators import called_directly
from veomni_hook.memory.host import BLOCKS

__all__ = ["fakes", "on", "swapped"]

_aten: Any = torch.ops.aten
#: Operators of activations whose integers decide what is allocated later.
_CHOOSE = frozenset((_aten.topk.default, _aten.argmax.default, _aten.sort.default, _aten.argsort.default))
#: Constructors of numbers. One with uninitialised memory is none: kernels that do not run would fill it.
_MAKE = frozenset(
    (_aten.arange, _aten.zeros, _aten.ones, _aten.full, _aten.scalar_tensor, _aten.lift_fresh, _aten.linspace)
)
#: Numbers of a tensor that is computed for real.
_MOST = 1 << 24
#: Its fake refuses what CPUs multiply.
_GROUPED: Any = getattr(getattr(_aten, "_grouped_mm", None), "default", None)
_SCALAR = _aten._local_scalar_dense.default


class _Numbers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Computes numbers for real, above a `FakeTensorMode`."""

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operator on real tensors if it has no others, and else on fake ones."""
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        fake = [tensor for tensor in tensors if isinstance(tensor, FakeTensor)]
        if fake:
            return _on_fakes(func, fake[0], args, kwargs)
        if tensors and all(tensor.numel() <= _MOST for tensor in tensors):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        result = func(*args, **kwargs)
        if tensors or func.overloadpacket not in _MAKE:
            return result
        if result.dtype.is_floating_point or result.numel() > _MOST:
            return result  # these are activations
        with unset_fake_temporarily():
            return func(*args, **kwargs)


def _on_fakes(func: Any, first: FakeTensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the result of an operator that gets fake tensors, of which ``first`` is the first."""
    if func is _SCALAR:  # a number that nobody computed
        return first.dtype is torch.bool or (1.0 if first.dtype.is_floating_point else 1)
    written = kwargs.get("out")
    if isinstance(written, FakeTensor) and written.numel():
        return written  # its memory is there, and not all operators of this form have a fake
    if func is _GROUPED and first.dtype is not torch.bfloat16:
        narrow = (operand.to(torch.bfloat16) for operand in args[:2])
        return func(*narrow, *args[2:], **kwargs).to(first.dtype)
    result = func(*args, **kwargs)
    return _chosen(func, result, args, kwargs) if func in _CHOOSE and first.numel() <= _MOST else result


def _chosen(func: Any, result: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the results with those integers that random activations would give."""
    with unset_fake_temporarily():
        activations = torch.rand(args[0].shape, device=args[0].device)
        drawn = func(activations, *args[1:], **kwargs)
    if isinstance(result, torch.Tensor):
        return drawn
    return tuple(
        number if not number.dtype.is_floating_point else fake
        for number, fake in zip(drawn, result, strict=True)
    )


@contextmanager
def fakes() -> Iterator[FakeTensorMode]:
    """Run the block's code on fake tensors: operators of kernels allocate, but launch nothing.

    The mode converts real tensors that meet fake ones.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with ExitStack() as stack:
        stack.enter_context(counted_as_plain(FakeTensor))
        stack.enter_context(called_directly())
        stack.enter_context(_without_launches())
        stack.enter_context(BLOCKS.set_aside())
        stack.enter_context(mode)
        stack.enter_context(_Numbers())  # type: ignore[no-untyped-call]
        yield mode


@contextmanager
def swapped(model: nn.Module, device: torch.device) -> Iterator[dict[int, torch.Tensor]]:
    """Let ``model`` have fake weights on ``device`` in the block; its own are put back afterwards.

    Yields the fakes by the ids of what they stand for.
    """
    stand_ins: dict[int, torch.Tensor] = {}

    def stand_in(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in stand_ins:
            empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
            stand_ins[id(tensor)] = (
                nn.Parameter(empty, requires_grad=tensor.requires_grad)
                if isinstance(tensor, nn.Parameter)
                else empty
            )
        return stand_ins[id(tensor)]

    with ExitStack() as stack:
        for module in model.modules():
            named: Any
            for named in (module._parameters, module._buffers):
                others = {name: stand_in(own) for name, own in named.items() if own is not None}
                stack.enter_context(changed(named, others))
        yield stand_ins


def on(device: torch.device, value: Any) -> Any:
    """Return ``value`` with its tensors of integers on ``device``, and fakes of its other tensors."""

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.dtype.is_floating_point:
            return tensor.to(device)
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)

    return tree_map_only(torch.Tensor, moved, value)


def _fake_among(values: tuple[Any, ...]) -> bool:
    return any(isinstance(leaf, FakeTensor) for leaf in tree_leaves(values))


def _as_subclass(fake: FakeTensor, kind: type[torch.Tensor]) -> torch.Tensor:
    """Return another fake of the same memory that is an instance of ``kind``, too."""
    other: torch.Tensor = _aten.alias.default(fake)
    if kind is not torch.Tensor:
        other.__class__ = _both(kind)
    return other


@cache
def _both(kind: type[torch.Tensor]) -> type[torch.Tensor]:
    both = new_class(f"Fake{kind.__name__}", (kind, FakeTensor))
    if counts_as_plain(kind):
        count_as_plain(both)
    return both


@contextmanager
def _without_launches() -> Iterator[None]:
    """Let launches of Triton that get fake tensors do nothing in the block; these have aligned addresses."""
    replacements: list[tuple[type, str, Any]] = [
        (FakeTensor, "data_ptr", lambda fake: 0),
        (FakeTensor, "as_subclass", _as_subclass),
    ]
    try:
        from triton.runtime.jit import KernelInterface

        from veomni_hook.kernels.shared.launch import Launch
    except ImportError:
        pass  # without Triton there is nothing to launch
    else:
        launch, prepare = Launch.__call__, KernelInterface.__getitem__

        def launched(self: Any, grid: Any, *arguments: Any) -> None:
            if not _fake_among(arguments):
                launch(self, grid, *arguments)

        def prepared(self: Any, grid: Any) -> Any:
            run = prepare(self, grid)
            return lambda *args, **options: None if _fake_among(args) else run(*args, **options)

        replacements += [(Launch, "__call__", launched), (KernelInterface, "__getitem__", prepared)]
    with ExitStack() as stack:
        for kind, name, method in replacements:
            if name in vars(kind):
                stack.callback(setattr, kind, name, vars(kind)[name])
            else:
                stack.callback(delattr, kind, name)
            setattr(kind, name, method)
        yield
