"""Attention on a CPU whose rows have the same bits in any batch: for checking results, not for speed.

Keys come in blocks that begin with the first key of a segment, so that a query meets the same blocks whatever
comes before or after them. A block that it does not see changes nothing, bit for bit. Within a block, every
sum is one over the last dimension, of a constant length.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from veomni_hook.batch_invariance.segments import Segment

__all__ = ["attend"]

_KEYS, _QUERIES = 64, 64


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segment: Segment, scale: float
) -> torch.Tensor:
    """Return attention of one segment, ``[heads, queries, width of values]``, in the dtype of ``query``.

    ``query`` is ``[heads, queries, head_dim]``, ``key`` and ``value`` ``[heads, keys, …]``, of the segment
    alone. Computed in float32, or float64 for float64.
    """
    dtype = torch.promote_types(query.dtype, torch.float32)
    q, k, v = (operand.to(dtype) for operand in (query, key, value))
    q = q * scale
    parts = [
        _rows(q[:, first : first + _QUERIES], k, v, segment, first)
        for first in range(0, q.shape[1], _QUERIES)
    ]
    return torch.cat(parts, 1).to(query.dtype)


def _rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segment: Segment, first: int) -> torch.Tensor:
    """Return the rows of the segment's queries from ``first`` on."""
    heads, rows = q.shape[:2]
    largest = q.new_full((heads, rows), -torch.inf)
    total = q.new_zeros(heads, rows)
    result = q.new_zeros(heads, rows, v.shape[2])
    last = _last_key(segment, first, rows)
    for begin in range(0, int(last.max()) + 1, _KEYS):
        parts = [operand[:, begin : begin + _KEYS] for operand in (k, v)]
        keys, values = (functional.pad(part, (0, 0, 0, _KEYS - part.shape[1])) for part in parts)
        scores = (q[:, :, None, :] * keys[:, None, :, :]).sum(-1)
        place = begin + torch.arange(_KEYS)
        visible = place[None, :] <= last[:, None]
        if segment.window:
            visible &= place[None, :] > last[:, None] - segment.window
        scores = scores.masked_fill(~visible, -torch.inf)
        raised = torch.maximum(largest, scores.amax(-1))
        anchor = raised.masked_fill(raised == -torch.inf, 0)
        kept = torch.exp(largest - anchor)
        weights = torch.exp(scores - anchor[:, :, None])
        total = total * kept + weights.sum(-1)
        added = (weights[:, :, None, :] * values.transpose(1, 2).contiguous()[:, None, :, :]).sum(-1)
        result = result * kept[:, :, None] + added
        largest = raised
    return result / total[:, :, None]


def _last_key(segment: Segment, first: int, rows: int) -> torch.Tensor:
    """Return the last key that each of ``rows`` queries from ``first`` on sees; 0 is the segment's first."""
    keys = segment.keys[1] - segment.keys[0]
    if not segment.causal:
        return torch.full((rows,), keys - 1)
    queries = segment.queries[1] - segment.queries[0]
    return torch.arange(first, first + rows) + keys - queries
