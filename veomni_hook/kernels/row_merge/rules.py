"""Which calls are of whole rows, what every kernel of this op refuses, and operands as matrices of rows.

A mask is of rows if its last dimension has one element, or is expanded (stride 0). On a GPU, the kernels
check on the device that the source has enough rows. On a CPU these rules do, and upstream's code raises its
own error.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from veomni_hook.kernels.shared.operand_checks import not_plain, untraceable

__all__ = ["add_rows", "loses", "merge_rows", "refuses", "refuses_added"]

#: Takes ``[rows, H]``, the source ``[n, H]``, the mask ``[rows]``, n, and whether rows are added.
Merge = Callable[[Tensor, Tensor, Tensor, int, bool], Tensor]

#: Torch's own method. Of an attribute, dynamo of torch 2.11 says that it is another one.
_TORCHS = Tensor.masked_scatter
#: Row numbers have 32 bits.
_MOST_ROWS = 1 << 31
_DEVICES = ("cpu", "cuda")


def refuses(owner: object, inputs: Tensor, mask: Tensor, source: Tensor, method: object) -> str | None:
    """Return why a call of ``masked_scatter`` must run as it is, or None.

    Args:
        owner: the module whose method calls it.
        inputs: what it is called with: ``[..., H]``.
        mask: bool, of rows, broadcastable to ``inputs``.
        source: the new rows, of the dtype of ``inputs``, in any shape whose elements are whole rows.
        method: what the patched code calls.
    """
    if method is not _TORCHS:
        return "torch.Tensor.masked_scatter was replaced"
    if (reason := _unfit(inputs, mask, source)) is not None:
        return reason
    if inputs.dtype is not source.dtype:
        return f"the inputs have dtype {inputs.dtype}, the source {source.dtype}"
    if not inputs.device == mask.device == source.device:
        return "the operands are on different devices"
    if (reason := _not_of_rows(inputs, mask, source)) is not None:
        return reason
    return _too_few(_rows_at(mask[..., 0], inputs), source.numel() // inputs.shape[-1], "fewer")


def refuses_added(owner: object, hidden_states: Tensor, mask: Tensor, source: Tensor) -> str | None:
    """Return why rows must be added by upstream's code, or None.

    Args:
        owner: the module whose method adds them.
        hidden_states: ``[..., H]``.
        mask: bool, the shape of ``hidden_states`` without the last dimension.
        source: ``[rows, H]`` on any device, in any dtype: upstream casts it.
    """
    if (reason := _unfit(hidden_states, mask, source)) is not None:
        return reason
    if mask.shape != hidden_states.shape[:-1]:
        return "the mask does not have the shape of the hidden states' rows"
    if not hidden_states.is_floating_point() or not source.is_floating_point():
        return "the hidden states or the source are not floating-point numbers"
    # One row would be added to every row at the mask.
    if source.ndim != 2 or source.shape[1] != hidden_states.shape[-1] or source.shape[0] == 1:
        return "the source is not a matrix with a row for each row of the mask"
    if hidden_states.device != mask.device:
        return "the operands are on different devices"
    return _too_few(_rows_at(mask, hidden_states), source.shape[0], "another number of")


def loses(owner: object, inputs: Tensor, *others: object) -> str | None:
    """Return why upstream's code is preferred for this call, or None."""
    return "on a CPU, there is no synchronisation to save" if inputs.device.type == "cpu" else None


def _unfit(inputs: Tensor, mask: Tensor, source: Tensor) -> str | None:
    reason = not_plain(inputs, mask, source) or untraceable()
    if reason is not None:
        return reason
    if mask.dtype is not torch.bool:
        return f"the mask has dtype {mask.dtype}"
    if not all(tensor.layout is torch.strided for tensor in (inputs, mask, source)):
        return "an operand is not a strided tensor"
    if inputs.ndim < 2 or not inputs.numel() or not source.numel():
        return "there are no rows"
    if inputs.device.type not in _DEVICES:
        return f"numbers of rows cannot be checked on {inputs.device.type}"
    return None if inputs.shape[:-1].numel() < _MOST_ROWS else "there are too many rows"


def _not_of_rows(inputs: Tensor, mask: Tensor, source: Tensor) -> str | None:
    if not 0 < mask.ndim <= inputs.ndim:
        return "the mask has another number of dimensions"
    whole = mask.shape[-1] == 1 or (mask.shape[-1] == inputs.shape[-1] and mask.stride(-1) == 0)
    if not whole:
        return "the mask is not of whole rows"
    if source.numel() % inputs.shape[-1]:
        return "the source does not consist of whole rows"
    sizes = zip(reversed(mask.shape[:-1]), reversed(inputs.shape[:-1]), strict=False)
    return None if all(size in (1, other) for size, other in sizes) else "the mask is larger than the inputs"


def _too_few(at: Tensor, rows: int, words: str) -> str | None:
    if at.device.type != "cpu" or torch.compiler.is_compiling():
        return None  # the kernels check it
    count = int(at.sum())
    fits = count <= rows if words == "fewer" else count == rows
    return None if fits else f"the source has {words} rows than the mask"


def _rows_at(mask: Tensor, inputs: Tensor) -> Tensor:
    """Return ``mask``, broadcastable to ``inputs`` without its last dimension, as ``[rows]``."""
    return mask.expand(inputs.shape[:-1]).reshape(-1)


def merge_rows(merge: Merge, inputs: Tensor, mask: Tensor, source: Tensor, method: object) -> Tensor:
    """Return ``inputs`` ``[..., H]`` with the rows at ``mask`` replaced by those of ``source``, in order.

    Operands are those that `refuses` accepts; the result is new and contiguous.
    """
    columns = inputs.shape[-1]
    at = _rows_at(mask[..., 0], inputs)
    source = source.reshape(-1, columns)
    return merge(inputs.reshape(-1, columns), source, at, source.shape[0], False).view(inputs.shape)


def add_rows(merge: Merge, hidden_states: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """Return ``hidden_states`` ``[..., H]`` with the rows of ``source`` added to those at ``mask``, in order.

    Operands are those that `refuses_added` accepts; the result is new and contiguous.
    """
    shape = hidden_states.shape
    source = source.to(hidden_states.device, hidden_states.dtype)
    at = _rows_at(mask, hidden_states)
    return merge(hidden_states.reshape(-1, shape[-1]), source, at, source.shape[0], True).view(shape)
