"""Batches whose sizes and masks the host still knows after they went to a device.

Sizes of images, masks and tokens come from data workers, on the host. What moves them notes their values
(`host_values.note_copy`), so what towers compute from sizes makes the host wait for nothing. With the setting
`host_values`, accelerate's data loaders and Trainer move batches by `sent` and `to` (specs in
`patches.models.shared` let them); of a collator, tensors are `carried`, and note it themselves.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from veomni_hook.kernels.shared.host_values import note_copy
from veomni_hook.kernels.shared.operand_checks import count_as_plain

__all__ = ["Carried", "carried", "sent", "tensors_in", "to"]

#: So many numbers are kept of any dtype: seconds between frames are floats.
_FEW = 1024
_MOVES = frozenset(("to", "cuda", "npu", "xpu", "pin_memory"))


def sent(send: Callable[..., object], batch: object, *arguments: object, **options: object) -> Any:
    """Return ``send(batch, *arguments, **options)``, with the values of integers noted, and of few floats.

    Args:
        send: moves a batch, as accelerate's ``send_to_device``. It may change the batch and return it.
        batch: tensors, in mappings and sequences.
    """
    before = [*tensors_in(batch)]
    result = send(batch, *arguments, **options)
    after = [*tensors_in(result)]
    if len(before) == len(after):
        for tensor, moved in zip(before, after, strict=True):
            _note(tensor, moved)
    return result


def to(tensor: torch.Tensor, **options: Any) -> torch.Tensor:
    """Return ``tensor.to(**options)``, with its values noted if they are integers, or few."""
    moved = tensor.to(**options)
    _note(tensor, moved)
    return moved


def _note(tensor: torch.Tensor, moved: torch.Tensor) -> None:
    values = tensor.numel() <= _FEW or not (tensor.is_floating_point() or tensor.is_complex())
    if values and tensor.device.type == "cpu" != moved.device.type and tensor.shape == moved.shape:
        # A copy: whoever made the batch may write into it afterwards.
        note_copy(moved, tensor.detach().to(moved.dtype, copy=True))


def tensors_in(batch: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested mappings, lists and tuples."""
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for item in batch.values():
            yield from tensors_in(item)
    elif isinstance(batch, list | tuple):
        for item in batch:
            yield from tensors_in(item)


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
