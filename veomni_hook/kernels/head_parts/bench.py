"""Parts of heads joined, as the queries and keys of DeepSeek-V3 and smaller ones of its kind.

A join reads both parts and writes them; its gradients are views. The keys' second part is the same for all
heads.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from veomni_hook import accelerator
from veomni_hook.kernels.problem import Problem, Results, Side, made, sides_of

__all__ = ["problems"]

# Sequences, positions, heads, widths of both parts, and whether the second is one for all heads.
_ACCELERATOR = (
    (4, 4096, 128, 128, 64, False),
    (4, 4096, 128, 128, 64, True),
    (2, 4096, 64, 192, 64, False),
    (2, 4096, 32, 128, 64, True),
)
_CPU = ((1, 64, 8, 32, 16, False),)


def problems(device: str, *, quick: bool) -> Iterator[Problem]:
    """Yield every size."""
    sizes = _ACCELERATOR if device in accelerator.TYPES else _CPU
    for batch, length, heads, first, second, shared in sizes[:2] if quick else sizes:
        whole = made(batch, length, heads, first + second, device=device)
        others = 1 if shared else heads
        other = made(batch, length, others, second, device=device)
        numbers = heads * first + others * second + heads * (first + second)
        yield Problem(
            op="head_parts",
            shape=f"{batch} x {length}, {heads} x ({first} + {second}{', shared' if shared else ''})",
            leaves=(whole, other),
            sides=sides_of("head_parts", "joined", device, call=_joined, first=first),
            limit="bytes",
            work={"forward": numbers * batch * length * whole.itemsize},
            incoming={"backward": [made(batch, heads, length, first + second, device=device)]},
        )


def _joined(kernel: Side, whole: torch.Tensor, other: torch.Tensor, *, first: int) -> Results:
    x, y = (part.transpose(1, 2) for part in (whole[..., :first], other))
    return kernel((x, y.expand(*x.shape[:-1], -1)), -1, torch.cat)
