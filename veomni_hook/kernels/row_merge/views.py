"""A call's operands as matrices of rows, for every backend."""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["add_rows", "merge_rows", "rows_at"]

Tensor = torch.Tensor
#: Takes ``[rows, H]``, the source ``[n, H]``, the mask ``[rows]``, and whether rows are added.
Merge = Callable[[Tensor, Tensor, Tensor, bool], Tensor]


def rows_at(mask: Tensor, inputs: Tensor) -> Tensor:
    """Return ``mask``, broadcastable to ``inputs`` without its last dimension, as ``[rows]``."""
    return mask.expand(inputs.shape[:-1]).reshape(-1)


def merge_rows(merge: Merge, inputs: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """Return ``inputs`` ``[..., H]`` with the rows at ``mask`` replaced by those of ``source``, in order.

    Operands are those that `rules.refuses` accepts; the result is new and contiguous.
    """
    columns = inputs.shape[-1]
    at = rows_at(mask[..., 0], inputs)
    return merge(inputs.reshape(-1, columns), source.reshape(-1, columns), at, False).view(inputs.shape)


def add_rows(merge: Merge, hidden_states: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """Return ``hidden_states`` ``[..., H]`` with the rows of ``source`` added to those at ``mask``, in order.

    Operands are those that `rules.refuses_added` accepts; the result is new and contiguous.
    """
    shape = hidden_states.shape
    source = source.to(hidden_states.device, hidden_states.dtype)
    at = rows_at(mask, hidden_states)
    return merge(hidden_states.reshape(-1, shape[-1]), source, at, True).view(shape)
