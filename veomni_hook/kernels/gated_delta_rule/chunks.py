"""Positions in chunks: those that one step of the scan computes are next to each other, for all samples.

The first chunks of all samples come first, then their second chunks, and so on. Samples with more chunks come
first, so those that have ended are always the last of a step. Chunks are filled with zeros, which neither
read nor write a state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn import functional

from veomni_hook.kernels.shared.autograd import differentiable
from veomni_hook.kernels.shared.host_values import derived

__all__ = ["LENGTH", "Chunks", "chunks_of"]

#: Positions of a chunk, as upstream's.
LENGTH = 64


class _Plan(NamedTuple):
    """Where the positions of samples are, if these are known by boundaries.

    Attributes:
        active: how many samples have a chunk at each step.
        order: the samples by their place in a step.
        places: the inverse.
        slots: of each position, in the chunks one after the other.
    """

    active: tuple[int, ...]
    order: torch.Tensor
    places: torch.Tensor
    slots: torch.Tensor


class Chunks:
    """The chunks of a batch.

    Attributes:
        active: how many samples have a chunk at each step of the scan.
        samples: how many there are.
    """

    def __init__(self, rows: int, positions: int, plan: _Plan | None = None, samples: int = 0) -> None:
        self._rows, self._positions, self._plan = rows, positions, plan
        self.active = (rows,) * -(-positions // LENGTH) if plan is None else plan.active
        self.samples = rows if plan is None else samples

    def in_order(self, states: torch.Tensor) -> torch.Tensor:
        """Return ``[samples, ...]`` in the order of a step."""
        return states if self._plan is None else states.index_select(0, self._plan.order)

    def back_in_order(self, states: torch.Tensor) -> torch.Tensor:
        """Return ``[samples, ...]`` in their own order."""
        return states if self._plan is None else states.index_select(0, self._plan.places)

    def spread(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return ``[rows, positions, heads, ...]`` as ``[chunks, heads, LENGTH, ...]`` of ``dtype``."""
        kept = tensor.shape[2:]
        if self._plan is None:
            missing = -self._positions % LENGTH
            padding = (0, 0) * len(kept) + (0, missing)
            filled = functional.pad(tensor, padding) if missing else tensor
            rows = filled.reshape(self._rows, len(self.active), LENGTH, *kept)
            chunks = rows.transpose(0, 1).flatten(0, 1)
        else:
            number = sum(self.active)
            spread_rows = _spread(tensor.flatten(0, 1), self._plan.slots, number * LENGTH)
            chunks = spread_rows.view(number, LENGTH, *kept)
        return chunks.transpose(1, 2).to(dtype, memory_format=torch.contiguous_format)

    def collect(self, chunks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return ``[chunks, heads, LENGTH, width]`` as ``[rows, positions, heads, width]``."""
        heads, _, width = chunks.shape[1:]
        by_position = chunks.to(dtype).transpose(1, 2)
        if self._plan is None:
            steps = by_position.reshape(len(self.active), self._rows, LENGTH, heads, width)
            return steps.transpose(0, 1).flatten(1, 2)[:, : self._positions].contiguous()
        chunked = by_position.flatten(0, 1)
        rows = _collect(chunked, self._plan.slots, chunked.shape[0])
        return rows.view(self._rows, self._positions, heads, width)


def chunks_of(tensor: torch.Tensor, cu_seqlens: torch.Tensor | None) -> Chunks:
    """Return the chunks of ``[rows, positions, ...]``, whose samples end at ``cu_seqlens``; None: rows."""
    rows, positions = tensor.shape[:2]
    if cu_seqlens is None:
        return Chunks(rows, positions)
    return Chunks(rows, positions, derived(cu_seqlens, _plan, tensor.device), cu_seqlens.numel() - 1)


def _plan(cu_seqlens: torch.Tensor, device: torch.device) -> _Plan:
    lengths = cu_seqlens.diff().to(torch.int64)
    chunks = (lengths + LENGTH - 1) // LENGTH
    order = chunks.argsort(descending=True, stable=True)
    steps = int(chunks.max()) if chunks.numel() else 0
    active = (chunks[:, None] > torch.arange(steps)).sum(0)
    first = active.cumsum(0) - active  # the first chunk of each step
    places = order.argsort()
    of_position = torch.repeat_interleave(torch.arange(lengths.numel()), lengths)
    within = torch.arange(of_position.numel()) - cu_seqlens[:-1].to(torch.int64)[of_position]
    slots = (first[within // LENGTH] + places[of_position]) * LENGTH + within % LENGTH
    sent = (tensor.to(device, non_blocking=True) for tensor in (order, places, slots))
    return _Plan(tuple(active.tolist()), *sent)


def _filled(rows: torch.Tensor, slots: torch.Tensor, size: int) -> torch.Tensor:
    return rows.new_zeros(size, *rows.shape[1:]).index_copy_(0, slots, rows)


def _picked(rows: torch.Tensor, slots: torch.Tensor, size: int) -> torch.Tensor:
    return rows.index_select(0, slots)


#: Rows at their slots among ``size``, zeros elsewhere. The backward reads slots, without zeros of its own.
_spread: Callable[..., torch.Tensor] = differentiable(
    _filled,
    lambda saved, rest, wanted, dy: (_collect(dy, saved[1], *rest), None),
    None,
    tensors=2,
    unread=1,
)
#: Rows from their slots among ``size``. The backward writes each slot once, where `index_select`'s would add.
_collect: Callable[..., torch.Tensor] = differentiable(
    _picked,
    lambda saved, rest, wanted, dy: (_spread(dy, saved[1], *rest), None),
    None,
    tensors=2,
    unread=1,
)
