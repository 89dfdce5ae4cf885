"""Attention by segment, as in towers: whole images, windows of 64 patches, and chunks of sound.

Work counts the products of queries with keys and of probabilities with values within the segments: 4 per
pair and column forward, 10 backward (the scores are recomputed).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from veomni_hook import accelerator
from veomni_hook.kernels.problem import Problem, Side, made
from veomni_hook.kernels.shared.host_values import note_copy
from veomni_hook.kernels.varlen_attention import flash
from veomni_hook.kernels.varlen_attention import torch as batched

__all__ = ["problems"]

# Name, lengths of segments, heads, columns of a head.
_ACCELERATOR = (
    ("8 images of 5,476", [5476] * 8, 16, 80),
    ("windows of 64", [64] * 684, 16, 80),
    ("windows, some smaller", [64, 64, 64, 40] * 180, 16, 80),
    ("8 images of different sizes", [5476, 4096, 2304, 7056, 1024, 6400, 3136, 5184], 16, 72),
    ("chunks of sound of 104", [104] * 160, 20, 64),
)
_CPU = (("2 images of 256", [256] * 2, 4, 80), ("windows of 64", [64] * 8, 4, 80))


def problems(device: str, *, quick: bool) -> Iterator[Problem]:
    """Yield every size."""
    sizes = _ACCELERATOR if device in accelerator.TYPES else _CPU
    for name, lengths, heads, width in sizes[:2] if quick else sizes:
        total = sum(lengths)
        host = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        bounds = note_copy(host.to(device), host)
        # As in a tower: positions come first in memory.
        leaves = [made(total, heads, width, device=device).transpose(0, 1).unsqueeze(0) for _ in range(3)]
        pairs = sum(length * length for length in lengths)
        flops = 4 * pairs * width * heads
        yield Problem(
            op="varlen_attention",
            shape=f"{name}, {heads} heads of {width}",
            leaves=leaves,
            sides=_sides(leaves[0], bounds, device),
            limit="flops",
            work={"forward": flops, "step": flops * 7 // 2},
            incoming={"backward": [made(1, total, heads, width, device=device)]},
        )


def _sides(q: torch.Tensor, bounds: torch.Tensor, device: str) -> dict[str, Side]:
    sides: dict[str, Side] = {"eager": partial(_upstream, bounds=bounds)}
    attention: Any = None  # no kernel calls it
    sides["runs"] = partial(batched.full, cu_seqlens=bounds, attention=attention, options={})
    if device == "cuda":
        sides["flash"] = partial(flash.full, cu_seqlens=bounds, attention=attention, options={})
    chosen = "flash" if device == "cuda" and flash.loses(None, q, q, q, bounds) is None else "runs"
    sides["ours"] = sides.pop(chosen)
    return sides


def _upstream(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    """As modeling files do it: the lengths are read for each of the three."""
    lengths = bounds[1:] - bounds[:-1]
    splits = [torch.split(tensor, lengths.tolist(), dim=2) for tensor in (q, k, v)]
    attend = functional.scaled_dot_product_attention
    segments = [attend(*segment).transpose(1, 2).contiguous() for segment in zip(*splits, strict=True)]
    return torch.cat(segments, dim=1)
