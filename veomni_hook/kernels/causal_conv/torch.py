"""Causal convolutions of one channel at a time with torch's convolution.

Only the first positions of a sample read what is before it. Where samples share a row, these few positions
are computed again, from their own sample alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional

from veomni_hook.kernels.shared.host_values import derived

__all__ = ["depthwise"]


class _First(NamedTuple):
    """The first positions of samples: their row and place, and the places and validity of what they read."""

    row: torch.Tensor
    place: torch.Tensor
    read: torch.Tensor
    valid: torch.Tensor


def depthwise(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the convolution; see `reference.depthwise`. Saved: what autograd saves."""
    channels, taps = weight.shape
    x = hidden_states.to(weight.dtype)
    output = functional.conv1d(x, weight.unsqueeze(1), bias, padding=taps - 1, groups=channels)
    output = output[:, :, : x.shape[2]]
    if cu_seqlens is not None and taps > 1:
        output = _separated(output, x, weight, bias, cu_seqlens)
    return (output if activation is None else functional.silu(output)).to(hidden_states.dtype)


def _separated(
    output: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    cu_seqlens: torch.Tensor,
) -> torch.Tensor:
    """Return ``output`` with the first positions of each sample computed from the sample alone."""
    first = derived(cu_seqlens, _first, x.shape[2], weight.shape[1], x.device)
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    read = x[first.row[:, None], :, first.read].to(dtype).masked_fill(~first.valid, 0.0)
    values = (read * weight.to(dtype).t()).sum(1)
    if bias is not None:
        values = values + bias.to(dtype)
    channels = torch.arange(x.shape[1], device=x.device)
    return output.index_put((first.row[:, None], channels, first.place[:, None]), values.to(output.dtype))


def _first(cu_seqlens: torch.Tensor, positions: int, taps: int, device: torch.device) -> _First:
    ends = cu_seqlens.to(torch.int64)
    lengths = ends.diff().clamp(max=taps - 1)
    starts = ends[:-1].repeat_interleave(lengths)
    within = torch.arange(starts.numel()) - (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    back = torch.arange(taps - 1, -1, -1)
    place = starts % max(positions, 1) + within
    read = (place[:, None] - back).clamp(min=0)
    valid = (within[:, None] >= back).unsqueeze(2)
    return _First(
        *(
            tensor.to(device, non_blocking=True)
            for tensor in (starts // max(positions, 1), place, read, valid)
        )
    )
