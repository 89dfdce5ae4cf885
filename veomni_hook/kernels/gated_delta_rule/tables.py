"""Where chunks and samples begin, as Triton's kernels read it."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from veomni_hook.kernels.gated_delta_rule.chunks import LENGTH
from veomni_hook.kernels.shared.host_values import derived

__all__ = ["Tables", "tables_of"]

#: Elements of int32 in 16 bytes.
_ALIGNED = 4


class Tables(NamedTuple):
    """Tensors of int32 on the device.

    Attributes:
        starts: ``[chunks]``, the first token of a chunk.
        ends: ``[chunks]``, the end of its sample.
        bounds: ``[samples + 1]``, the tokens at which samples begin and end.
        first: ``[samples + 1]``, the chunks at which they do.
    """

    starts: torch.Tensor
    ends: torch.Tensor
    bounds: torch.Tensor
    first: torch.Tensor


def tables_of(tensor: torch.Tensor, cu_seqlens: torch.Tensor | None) -> Tables:
    """Return the tables of ``[rows, positions, ...]``, whose samples end at ``cu_seqlens``; None: rows."""
    if cu_seqlens is None:
        return _of_rows(tensor.shape[0], tensor.shape[1], tensor.device)
    return derived(cu_seqlens, _tables, tensor.device)


@lru_cache(maxsize=256)
def _of_rows(rows: int, positions: int, device: torch.device) -> Tables:
    return _tables(torch.arange(rows + 1) * positions, device)


def _tables(bounds: torch.Tensor, device: torch.device) -> Tables:
    lengths = bounds.diff().long()
    chunks = (lengths + LENGTH - 1) // LENGTH
    first = torch.cat((chunks.new_zeros(1), chunks.cumsum(0)))
    within = torch.arange(int(first[-1])) - first[:-1].repeat_interleave(chunks)
    starts = bounds[:-1].long().repeat_interleave(chunks) + within * LENGTH
    ends = bounds[1:].repeat_interleave(chunks)
    # One copy to the device, in which each begins where `Launch` finds it aligned.
    tables = (starts, ends, bounds, first)
    padded = [pad(table.to(torch.int32), (0, -table.numel() % _ALIGNED)) for table in tables]
    sent = torch.cat(padded).to(device, non_blocking=True)
    parts = torch.split(sent, [table.numel() for table in padded])
    return Tables(*(part[: table.numel()] for part, table in zip(parts, tables, strict=True)))
