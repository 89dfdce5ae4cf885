"""Which memory lives at the peak of what runs in a block, by the part of the model that allocated it.

A dispatch mode sees every result of an operator, and a weak reference to its storage when that ends. No
module gets a hook, because kernels do not run where one is: which module runs is read from the stack.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import cache
from types import CodeType, FrameType
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from veomni_hook.kernels.shared.changed import changed

__all__ = ["Tracker", "operand_names", "parts_of"]

#: What CUDA's allocator rounds sizes to.
_ROUNDED = 512
# The frame of a module's call whose locals live as long as the call: reading those of another would keep
# alive what it has already dropped.
_CALL = nn.Module._wrapped_call_impl.__code__
#: Of allocations in a backward pass outside of any module's code.
BACKWARD = "backward pass"
#: Of buffers inside of attention's own backward.
INSIDE = "inside of attention"
#: Of those of models outside of their layers, and of models with a head.
MODEL, LOSS = "model", "loss"


class Tracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of storages on devices of one type, by label.

    Attributes:
        peak: the most bytes that lived at once.
        at_peak: the bytes by label that lived then.
    """

    def __init__(self, device: str, parts: Mapping[int, str], within: CodeType) -> None:
        """Count nothing yet.

        Args:
            device: the type of the devices whose memory is counted.
            parts: the labels of modules, by id; modules without one belong to their caller's part.
            within: the code that calls the model; what calls this code allocates nothing here.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._parts = parts
        self._within = within
        self._live: dict[int, tuple[int, str, object]] = {}
        self._bytes: Counter[str] = Counter()
        self._total = 0
        self._label = ""
        self.peak = 0
        self.at_peak: dict[str, int] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run the operator, and count what is new of its results."""
        result = func(*args, **(kwargs or {}))
        for leaf in (result,) if isinstance(result, torch.Tensor) else tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf, "")
        if self._device == "cuda" and (inside := _inside(func, args)):
            self._add(INSIDE, inside)
            self._add(INSIDE, -inside)
        return result

    def label(self, values: Iterable[object], label: str) -> None:
        """Count the tensors among ``values`` under ``label``, also if they are counted under another."""
        for tensor in values:
            if isinstance(tensor, torch.Tensor):
                self._drop(tensor.untyped_storage()._cdata)
                self._count(tensor, label)

    def labelled(self, label: str) -> AbstractContextManager[None]:
        """Count what is allocated in the block under ``label``."""
        return changed(vars(self), {"_label": label})

    def begin(self) -> None:
        """Forget the peak so far."""
        self.peak, self.at_peak = self._total, dict(self._bytes)

    def _count(self, tensor: torch.Tensor, label: str) -> None:
        if tensor.device.type != self._device or tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._live or not size:
            return
        if self._device == "cuda":
            size = -(-size // _ROUNDED) * _ROUNDED
        label = label or self._label or self._part()
        self._live[key] = size, label, ref(storage, lambda _: self._drop(key))
        self._add(label, size)

    def _add(self, label: str, size: int) -> None:
        self._bytes[label] += size
        self._total += size
        if self._total > self.peak:
            self.peak, self.at_peak = self._total, dict(self._bytes)

    def _drop(self, key: int) -> None:
        if key in self._live:
            size, label, _ = self._live.pop(key)
            self._add(label, -size)

    def _part(self) -> str:
        """Return the part of the innermost module that runs and has one."""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_code is not self._within:
            if frame.f_code is _CALL:
                part = self._parts.get(id(frame.f_locals["self"]))
                if part is not None:
                    return part
            frame = frame.f_back
        return BACKWARD


def _inside(func: Callable[..., Any], args: tuple[Any, ...]) -> int:
    """Return the bytes that an operator allocates and frees: known of the backward of attention.

    In float32 the gradient of queries, and a number for each of their rows; gradients of keys and values for
    each head of queries, where these share them. Measured of cuDNN's on an H200.
    """
    names = operand_names(func)
    if names[:1] not in (("grad_out",), ("grad_out_",)) or names[1:4] != ("query", "key", "value"):
        return 0
    query: torch.Tensor = args[1]
    key: torch.Tensor = args[2]
    rows, size = query.numel() // query.shape[-1], query.element_size()
    shared = query.shape[1] > key.shape[1]
    return 4 * (query.numel() + rows) + (2 * size * query.numel() if shared else 0)


@cache
def operand_names(func: Any) -> tuple[str, ...]:
    """Return the names of an operator's operands; none if it has no schema."""
    schema = getattr(func, "_schema", None)
    return () if schema is None else tuple(argument.name for argument in schema.arguments)


def parts_of(model: nn.Module) -> dict[int, str]:
    """Return the labels of a model's modules, by id.

    A layer, a module of a list, has the name of its list, and its children have names of their own, the same
    in all layers. What holds no layers has its own name. The output embeddings belong to the loss.
    """
    parts: dict[int, str] = {}
    for name, module in model.named_modules():
        path = name.split(".")
        place = next((place for place, word in enumerate(path) if word.isdigit()), None)
        if place is not None:
            parts[id(module)] = path[place + 1] if place + 1 < len(path) else path[place - 1]
        else:
            holds = any(isinstance(inner, nn.ModuleList) for inner in module.modules())
            parts[id(module)] = MODEL if holds or not name else path[-1]
    for module in model.modules():
        find = getattr(module, "get_output_embeddings", None)
        if find is not None and (head := find()) is not None:
            parts[id(module)] = parts[id(head)] = LOSS
    return parts
