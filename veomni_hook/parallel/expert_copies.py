"""Copies of rows, and sums over the copies of a row: what moves tokens to experts and results back.

`spread` copies rows, and its gradient is a sum; `collect` sums copies, and its gradient copies. Both are
exact opposites, so one kernel serves both. Sums run over a row's copies in order, in float32, and are rounded
once: the result does not depend on the order in which programs run.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Copies", "collect", "copies_of", "spread", "sum_of_copies"]


class Copies(NamedTuple):
    """Which rows are copied, and where the copies are.

    Attributes:
        sources: ``[copies]``: the row that a copy is of.
        places: ``[rows, places]``: the copies of a row; a place without a copy holds the number of copies.
    """

    sources: Tensor
    places: Tensor

    def first(self, count: int) -> Copies:
        """Return these copies with ``count`` sources: how many there are, which only the host knows."""
        return self._replace(sources=self.sources[:count])


def copies_of(wanted: Tensor, *, by_place: bool) -> Copies:
    """Return the copies that ``wanted`` ``[rows, places]`` (booleans) asks for; reads nothing to the host.

    So there are sources for as many copies as there could be: `Copies.first` takes those that there are.

    Args:
        wanted: whether a row has a copy at a place.
        by_place: copies are sorted by place, then by row; otherwise by row, then by place.
    """
    asked = (wanted.t() if by_place else wanted).reshape(-1)
    number = torch.where(asked, asked.cumsum(0) - 1, asked.sum())
    at = torch.arange(asked.shape[0], device=asked.device, dtype=torch.int32)
    row = at % wanted.shape[0] if by_place else torch.div(at, wanted.shape[1], rounding_mode="floor")
    # The element behind the copies takes what is not copied.
    sources = row.new_zeros(row.shape[0] + 1).scatter_(0, number, row)
    places = number.to(torch.int32)
    places = places.view(wanted.shape[1], -1).t() if by_place else places.view(wanted.shape)
    return Copies(sources, places.contiguous())


def spread(rows: Tensor, copies: Copies) -> Tensor:
    """Return ``[copies, width]``: the copies of ``rows`` ``[rows, width]``; differentiable."""
    return _Moved.apply(rows, *copies, False)  # type: ignore[no-untyped-call,no-any-return]


def collect(rows: Tensor, copies: Copies) -> Tensor:
    """Return ``[rows, width]``: the sum of each row's copies ``[copies, width]``; differentiable."""
    return _Moved.apply(rows, *copies, True)  # type: ignore[no-untyped-call,no-any-return]


class _Moved(torch.autograd.Function):
    """Rows to their copies, or (``collects``) copies to their rows: either is the gradient of the other."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        sources: Tensor,
        places: Tensor,
        collects: bool,  # noqa: FBT001 - `apply` takes no keywords
    ) -> Tensor:
        # Saved on every rank, whatever it received: the recompute of a checkpoint, which ends with the last
        # saved tensor, then runs the same exchanges on all ranks.
        ctx.save_for_backward(sources, places)
        ctx.collects = collects
        return sum_of_copies(rows, Copies(sources, places)) if collects else rows.index_select(0, sources)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return (spread if ctx.collects else collect)(grad, Copies(*ctx.saved_tensors)), None, None, None


def sum_of_copies(rows: Tensor, copies: Copies) -> Tensor:
    """Return what `collect` returns; not differentiable."""
    if rows.device.type == "cuda" and rows.dtype in (torch.bfloat16, torch.float16, torch.float32):
        try:
            # Only here: processes without Triton have no such module.
            from veomni_hook.kernels.moe_experts.triton_sums import sum_places
        except ImportError:
            pass
        else:
            return sum_places(rows, copies.places)
    count, width = copies.places.shape
    out = rows.new_zeros(count, rows.shape[1], dtype=torch.promote_types(rows.dtype, torch.float32))
    padded = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
    for place in range(width):
        out += padded.index_select(0, copies.places[:, place])
    return out.to(rows.dtype)
