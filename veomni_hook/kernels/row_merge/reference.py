"""Merged and added rows by definition: the oracle for tests, and the pattern for added ones."""

from __future__ import annotations

import torch

__all__ = ["rows", "rows_added"]


def rows(inputs: torch.Tensor, mask: torch.Tensor, source: torch.Tensor, method: object) -> torch.Tensor:
    """Return ``inputs`` ``[..., H]`` with the rows at ``mask`` replaced by those of ``source``, in order.

    ``mask`` is ``[..., 1]``, or expanded from it; ``source`` has the elements of at least as many rows.
    ``method`` is what upstream calls, ``torch.Tensor.masked_scatter``.
    """
    at = mask[..., 0].expand(inputs.shape[:-1])
    result = inputs.clone(memory_format=torch.contiguous_format)
    result[at] = source.reshape(-1, inputs.shape[-1])[: at.sum()]
    return result


def rows_added(hidden_states: torch.Tensor, mask: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Return ``hidden_states`` ``[..., H]`` with the rows of ``source`` added to those at ``mask``, in order.

    ``mask`` is ``[...]``, and ``source`` ``[rows, H]`` has as many rows as are set in it.
    """
    result = hidden_states.clone()
    at = mask.to(hidden_states.device)
    result[at, :] = result[at, :] + source.to(hidden_states.device, hidden_states.dtype)
    return result
