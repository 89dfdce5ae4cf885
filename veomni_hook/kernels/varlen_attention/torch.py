"""Attention by segment with one call of torch's fused attention for each run of segments of one length.

Segments of equal length that follow one another are a batch. Windows of a tower are mostly of one length, and
so are the frames of a video. Images mostly differ: then each has its own call, as upstream. Where many short
runs take turns, positions are sorted by the length of their segment first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from veomni_hook.kernels.shared.autograd import differentiable
from veomni_hook.kernels.shared.host_values import derived
from veomni_hook.kernels.varlen_attention.operand_checks import lengths_of

__all__ = ["Run", "full", "runs_of"]

#: Sorting passes eight times over memory in a step; a call and its backward cost the host some 150 us.
_FEW_CALLS = 8


class Run(NamedTuple):
    """So many segments of one length, next to each other."""

    length: int
    segments: int


class _Plan(NamedTuple):
    """The runs; where positions are sorted, which one comes at each place, and the inverse of that."""

    runs: tuple[Run, ...]
    order: torch.Tensor | None = None
    inverse: torch.Tensor | None = None


def full(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    attention: Callable[..., object],
    options: Mapping[str, Any],
) -> torch.Tensor:
    """Return attention within the segments; see `reference.full`. Saved: what torch's operator saves."""
    runs, order, inverse = derived(cu_seqlens, _plan, query.device)
    tensors = [tensor[0] for tensor in (query, key, value)]
    if order is not None:
        tensors = [_sorted(tensor, order, inverse, 1) for tensor in tensors]
    sizes = [run.length * run.segments for run in runs]
    # One split: its backward joins the parts' gradients once, where slices would add as many full tensors.
    parts = zip(*(torch.split(tensor, sizes, dim=1) for tensor in tensors), strict=True)
    outputs = []
    for run, part in zip(runs, parts, strict=True):
        q, k, v = (_batch(tensor, run) for tensor in part)
        output = functional.scaled_dot_product_attention(
            q, k, v, scale=options.get("scaling"), enable_gqa=q.shape[1] != k.shape[1]
        )
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    if inverse is not None:
        joined = _sorted(joined, inverse, order, 0)
    return joined.unsqueeze(0).contiguous()


def runs_of(cu_seqlens: torch.Tensor) -> tuple[Run, ...]:
    """Return the runs of segments in order, without empty ones."""
    lengths = filter(None, lengths_of(cu_seqlens))
    return tuple(Run(length, len(list(segments))) for length, segments in groupby(lengths))


def _batch(tensor: torch.Tensor, run: Run) -> torch.Tensor:
    """Return ``[heads, positions, width]`` of a run as ``[segments, heads, length, width]``."""
    heads, _, width = tensor.shape
    return tensor.reshape(heads, run.segments, run.length, width).transpose(0, 1)


def _plan(cu_seqlens: torch.Tensor, device: torch.device) -> _Plan:
    """Return the calls for the segments; indices are on ``device``."""
    runs = runs_of(cu_seqlens)
    lengths = sorted({run.length for run in runs})
    if len(runs) - len(lengths) <= _FEW_CALLS:
        return _Plan(runs)
    of_position = torch.repeat_interleave(
        torch.tensor([run.length for run in runs]),
        torch.tensor([run.length * run.segments for run in runs]),
    )
    order = of_position.argsort(stable=True)
    counts = {length: sum(run.segments for run in runs if run.length == length) for length in lengths}
    sent = (tensor.to(device, non_blocking=True) for tensor in (order, order.argsort()))
    return _Plan(tuple(Run(*item) for item in counts.items()), *sent)


def _permuted(tensor: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor, dim: int) -> torch.Tensor:
    # A new tensor whose positions come first in memory, as in a tower.
    return tensor.movedim(dim, 0).index_select(0, order).movedim(0, dim)


#: Takes a tensor, the order of the positions along a dimension, its inverse, and the dimension. The backward
#: takes the inverse, where `index_select`'s would add with atomics.
_sorted: Callable[..., torch.Tensor] = differentiable(
    _permuted,
    lambda saved, rest, wanted, dy: (_sorted(dy, saved[2], saved[1], *rest), None, None),
    None,
    tensors=3,
    unread=1,
)
