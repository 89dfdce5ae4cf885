"""Causal convolutions of one channel at a time with silu, as in Qwen3-Next, against a copy of their bytes.

Forward reads the input and writes the output; backward reads the input and a gradient and writes another.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch.nn import functional

from veomni_hook import accelerator
from veomni_hook.kernels.causal_conv import torch as of_torch
from veomni_hook.kernels.problem import Problem, Side, made
from veomni_hook.kernels.selection.registry import load_attribute
from veomni_hook.kernels.shared.samples import boundaries

__all__ = ["problems"]

# Positions, samples of them (0: one), channels.
_ACCELERATOR = ((16384, 0, 8192), (16384, 16, 8192), (4096, 0, 2048))
_CPU = ((512, 0, 256), (512, 8, 256))
_TAPS = 4


def problems(device: str, *, quick: bool) -> Iterator[Problem]:
    """Yield every size; memory holds channels next to each other, as behind a projection."""
    sizes = _ACCELERATOR if device in accelerator.TYPES else _CPU
    kernel = of_torch.depthwise
    if device == "cuda":
        kernel = load_attribute("veomni_hook.kernels.causal_conv.triton:depthwise")
    for positions, samples, channels in sizes[:2] if quick else sizes:
        x, weight = made(1, positions, channels, device=device), made(channels, _TAPS, device=device)
        ends = list(range(0, positions + 1, positions // samples)) if samples else None
        bounds = None if ends is None else boundaries(ends, x.device)
        moved = x.numel() * x.element_size()
        yield Problem(
            op="causal_conv",
            shape=f"{positions} x {channels}, {max(samples, 1)} samples",
            leaves=[x, weight],
            # Where samples share a row, upstream's code computes them as one: it has no boundaries.
            sides={"eager": _upstream, "ours": partial(_depthwise, kernel, bounds=bounds)},
            limit="bytes",
            work={"forward": 2 * moved, "backward": 3 * moved},
            incoming={"backward": [made(1, positions, channels, device=device)]},
        )


def _upstream(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    from transformers.models.qwen3_next.modeling_qwen3_next import causal_conv1d_fn

    x = x.transpose(1, 2)
    if causal_conv1d_fn is None:  # the layer of early releases, where no package is installed
        channels, taps = weight.shape
        output = functional.conv1d(x, weight[:, None], padding=taps - 1, groups=channels)
        return functional.silu(output[..., : x.shape[2]]).transpose(1, 2)
    fused: torch.Tensor = causal_conv1d_fn(x, weight, activation="silu")
    return fused.transpose(1, 2)


def _depthwise(
    kernel: Side, x: torch.Tensor, weight: torch.Tensor, bounds: torch.Tensor | None
) -> torch.Tensor:
    output = kernel(x.transpose(1, 2), weight, None, "silu", bounds)
    assert isinstance(output, torch.Tensor)  # noqa: S101
    return output.transpose(1, 2)
