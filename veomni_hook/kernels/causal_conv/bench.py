"""Causal convolutions of one channel at a time with silu, as in Qwen3-Next, against a copy of their bytes.

Forward reads the input and writes the output; backward reads the input and a gradient and writes another.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from veomni_hook import accelerator
from veomni_hook.kernels.causal_conv import torch as of_torch
from veomni_hook.kernels.problem import Problem, Side, made
from veomni_hook.kernels.shared.samples import boundaries

__all__ = ["problems"]

# Positions, samples of them (0: one), channels.
_ACCELERATOR = ((16384, 0, 8192), (16384, 16, 8192), (4096, 0, 2048))
_CPU = ((512, 0, 256), (512, 8, 256))
_TAPS = 4


def problems(device: str, *, quick: bool) -> Iterator[Problem]:
    """Yield every size; memory holds channels next to each other, as behind a projection."""
    sizes = _ACCELERATOR if device in accelerator.TYPES else _CPU
    for positions, samples, channels in sizes[:2] if quick else sizes:
        x, weight = made(1, positions, channels, device=device), made(channels, _TAPS, device=device)
        ends = list(range(0, positions + 1, positions // samples)) if samples else None
        bounds = None if ends is None else boundaries(ends, x.device)
        moved = x.numel() * x.element_size()
        yield Problem(
            op="causal_conv",
            shape=f"{positions} x {channels}, {max(samples, 1)} samples",
            leaves=[x, weight],
            sides=_sides(bounds, device),
            limit="bytes",
            work={"forward": 2 * moved, "backward": 3 * moved},
            incoming={"backward": [made(1, positions, channels, device=device)]},
        )


def _sides(bounds: torch.Tensor | None, device: str) -> dict[str, Side]:
    """Where samples share a row, upstream's code computes them as one: it has no boundaries."""
    sides: dict[str, Side] = {"eager": _upstream, "ours": partial(_torch, bounds=bounds)}
    if device == "cuda":
        sides["ours"] = partial(_triton, bounds=bounds)
    return sides


def _upstream(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    from transformers.models.qwen3_next.modeling_qwen3_next import causal_conv1d_fn

    output: torch.Tensor = causal_conv1d_fn(x.transpose(1, 2), weight, activation="silu")
    return output.transpose(1, 2)


def _torch(x: torch.Tensor, weight: torch.Tensor, bounds: torch.Tensor | None) -> torch.Tensor:
    return of_torch.depthwise(x.transpose(1, 2), weight, None, "silu", bounds).transpose(1, 2)


def _triton(x: torch.Tensor, weight: torch.Tensor, bounds: torch.Tensor | None) -> torch.Tensor:
    from veomni_hook.kernels.causal_conv.triton import depthwise

    return depthwise(x.transpose(1, 2), weight, None, "silu", bounds).transpose(1, 2)
