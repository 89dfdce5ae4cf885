"""Attention by segment with one call of torch's fused attention for all segments of a length.

Segments of equal length are a batch. Most windows of a tower are of one length, and so are the frames of a
video; images mostly differ, and then each has its own call, as upstream.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from veomni_hook.kernels.shared.host_values import derived
from veomni_hook.kernels.varlen_attention.operand_checks import lengths_of

__all__ = ["full"]


class _Batch(NamedTuple):
    """Segments of one length: those from ``start`` on if they follow each other, else at ``positions``."""

    length: int
    segments: int
    start: int
    positions: torch.Tensor | None


class _Plan(NamedTuple):
    """All batches, and where each position of the sequence is in them; None: in order."""

    batches: tuple[_Batch, ...]
    order: torch.Tensor | None


def full(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    attention: Callable[..., Any],
    options: Mapping[str, Any],
) -> torch.Tensor:
    """Return attention within the segments; see `reference.full`. Saved: what torch's operator saves."""
    plan = derived(cu_seqlens, _plan, query.device)
    outputs = []
    for batch in plan.batches:
        q, k, v = (_taken(each, batch) for each in (query, key, value))
        output = functional.scaled_dot_product_attention(
            q, k, v, scale=options.get("scaling"), enable_gqa=q.shape[1] != k.shape[1]
        )
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    if plan.order is not None:
        joined = joined.index_select(0, plan.order)
    return joined.unsqueeze(0).contiguous()


def _taken(tensor: torch.Tensor, batch: _Batch) -> torch.Tensor:
    """Return ``[1, heads, positions, width]`` at a batch, as ``[segments, heads, length, width]``."""
    size = batch.segments * batch.length
    if batch.positions is None:
        part = tensor[0, :, batch.start : batch.start + size]
    else:
        part = tensor[0].index_select(1, batch.positions)
    heads, _, width = part.shape
    return part.reshape(heads, batch.segments, batch.length, width).transpose(0, 1)


def _plan(cu_seqlens: torch.Tensor, device: torch.device) -> _Plan:
    """Return the batches of the segments; indices are on ``device``."""
    starts: dict[int, list[int]] = {}
    start = 0
    for length in lengths_of(cu_seqlens):
        if length:
            starts.setdefault(length, []).append(start)
        start += length
    batches = [_batch(length, first, device) for length, first in starts.items()]
    in_order = all(batch.positions is None for batch in batches) and [b.start for b in batches] == sorted(
        b.start for b in batches
    )
    if in_order:
        return _Plan(tuple(batches), None)
    taken = torch.cat([_positions(length, first) for length, first in starts.items()])
    return _Plan(tuple(batches), taken.argsort().to(device, non_blocking=True))


def _batch(length: int, starts: list[int], device: torch.device) -> _Batch:
    following = all(second - first == length for first, second in pairwise(starts))
    positions = None if following else _positions(length, starts).to(device, non_blocking=True)
    return _Batch(length, len(starts), starts[0], positions)


def _positions(length: int, starts: list[int]) -> torch.Tensor:
    """Return the positions of segments of one length, in order."""
    return (torch.tensor(starts)[:, None] + torch.arange(length)).flatten()
