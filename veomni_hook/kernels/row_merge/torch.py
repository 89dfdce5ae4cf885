"""Rows merged or added in PyTorch, on any device, without a value read on the host.

Forward:  place = cumsum(mask) - 1;  y[r] = source[place[r]] (+ x[r] if added) where mask[r], else x[r]
Backward: dx[r] = 0 where mask[r] and not added, else dy[r];  dsource[place[r]] = dy[r] where mask[r], 0 for
    rows of the source that the mask did not use
Shapes: x, y [rows, H], mask [rows] bool, source [n, H], one dtype.
Saved: the count of mask's rows up to each row, int64 [rows]. Mutates: nothing. Deterministic.

The backward gathers: row numbers are scattered to their places, those outside the mask to one more place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from veomni_hook.kernels.row_merge.rules import add_rows, merge_rows
from veomni_hook.kernels.shared.autograd import differentiable

__all__ = ["FEWER", "OTHER", "check", "gradients", "rows", "rows_added"]

Tensor = torch.Tensor
#: What the assertion on the device says.
FEWER = "row_merge: the source has fewer rows than the mask"
OTHER = "row_merge: the source has another number of rows than the mask"


def _merge(x: Tensor, source: Tensor, mask: Tensor, rows: int, added: bool) -> tuple[Tensor, Tensor]:
    counts = mask.cumsum(0)
    check(counts[-1], rows, added=added)
    place = (counts - 1).clamp(0, rows - 1)
    taken = source.index_select(0, place)
    return torch.where(mask.unsqueeze(1), x + taken if added else taken, x), counts


def gradients(
    saved: Sequence[Any], rest: tuple[int, bool], wanted: Sequence[bool], dy: Tensor
) -> tuple[Tensor | None, Tensor | None, None]:
    """Return the gradients of the inputs and of the source, as `differentiable` asks for them.

    ``saved`` ends with the mask and, in int64, the counts of its rows up to each row. ``rest``: the number of
    rows of the source, and whether they were added.
    """
    (*_, mask, counts), (n, added) = saved, rest
    dx = dsource = None
    if wanted[0]:
        dx = dy if added else dy.masked_fill(mask.unsqueeze(1), 0)
    if wanted[1]:
        place = torch.where(mask, counts - 1, n).clamp_(max=n)
        numbers = torch.arange(len(mask), device=mask.device)
        row = numbers.new_zeros(n + 1).scatter_(0, place, numbers)[:n]
        unused = torch.arange(n, device=mask.device) >= counts[-1]
        dsource = dy.index_select(0, row).masked_fill(unused.unsqueeze(1), 0)
    return dx, dsource, None


_apply: Callable[..., Tensor] = differentiable(_merge, gradients, None, tensors=3, unread=2)


def check(count: Tensor, rows: int, *, added: bool) -> None:
    """Assert, on the device of ``count``, that a source of ``rows`` rows has as many as the mask."""
    torch._assert_async(count == rows if added else count <= rows, OTHER if added else FEWER)


rows, rows_added = partial(merge_rows, _apply), partial(add_rows, _apply)
