"""Tensors of a batch whose values the host still knows after they went to a device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from veomni_hook.kernels.shared.host_values import note_copy
from veomni_hook.kernels.shared.operand_checks import count_as_plain

__all__ = ["Carried", "carried"]

_MOVES = frozenset(("to", "cuda", "npu", "xpu", "pin_memory"))


class Carried(torch.Tensor):
    """A tensor on the CPU; a tensor that it is moved to has its values noted (`host_values.note_copy`).

    Whatever moves a batch calls ``tensor.to(device)``: a loop, accelerate, transformers' Trainer. Pinned, it
    is still such a tensor; everything else that is computed from it is a plain tensor.
    """

    def __deepcopy__(self, memo: dict[int, object]) -> Any:
        """A copy is such a tensor, too; torch's own asks for ``new_empty`` of the class."""
        if id(self) not in memo:
            memo[id(self)] = carried(copy.deepcopy(_plain(self), memo))
        return memo[id(self)]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> Any:
        """Run ``func`` on plain tensors; keep track of moves."""
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            if not isinstance(result, torch.Tensor) or getattr(func, "__name__", "") not in _MOVES:
                return _plain(result)
            moved = _plain(result)
            if moved.device.type == "cpu":
                return moved.as_subclass(cls) if moved.dtype == args[0].dtype else moved
            # A copy: whoever moved a tensor may write into it afterwards.
            return note_copy(moved, _plain(args[0]).to(moved.dtype, copy=True))


def carried(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor``, on the CPU, as one whose values go with it."""
    return tensor.as_subclass(Carried) if tensor.device.type == "cpu" else tensor


def _plain(value: object) -> Any:
    return value.as_subclass(torch.Tensor) if type(value) is Carried else value


# On a CPU, where nothing is moved, kernels read it as it is.
count_as_plain(Carried)
