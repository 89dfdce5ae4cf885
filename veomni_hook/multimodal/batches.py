"""Batches whose sizes and masks the host still knows after they went to a device (setting `host_values`).

Sizes of images, masks and tokens come from data workers, on the host. Specs in `patches.models.shared` let
accelerate's data loaders and Trainer move them by the functions here, which note the values
(`host_values.note_copy`). What towers compute from sizes then makes the host wait for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from veomni_hook.kernels.shared.host_values import note_copy

__all__ = ["sent", "tensors_in", "to"]

#: So many numbers are kept of any dtype: seconds between frames are floats.
_FEW = 1024


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
