"""Decays of channels, as in a layer of Kimi-Linear (softplus) and of GLM-5-Next (bounded).

Forward reads x and writes the decay in float32. Backward reads x and the gradient, and writes that of x.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from veomni_hook import accelerator
from veomni_hook.kernels.problem import Problem, made, sides_of

__all__ = ["problems"]

# Positions, heads and their width, and the bound.
_ACCELERATOR = ((16384, 32, 128, None), (16384, 32, 128, -5.0), (65536, 32, 128, None), (4096, 16, 128, None))
_CPU = ((512, 4, 64, None), (512, 4, 64, -5.0))


def problems(device: str, *, quick: bool) -> Iterator[Problem]:
    """Yield every size."""
    sizes = _ACCELERATOR if device in accelerator.TYPES else _CPU
    for positions, heads, width, lower in sizes[:2] if quick else sizes:
        x = made(1, positions, heads, width, device=device)
        log_rate, bias = made(1, 1, heads, 1, device=device), made(heads * width, device=device)
        yield Problem(
            op="log_decay_channels",
            shape=f"{positions} x {heads} x {width}{', bounded' if lower is not None else ''}",
            leaves=(x, log_rate, bias),
            sides=sides_of(
                "log_decay", "channels", device, dtype=None, bounded=lower is not None, lower=lower
            ),
            limit="bytes",
            work={"forward": 3 * x.nbytes, "backward": 4 * x.nbytes},
            incoming={"backward": [torch.randn(x.shape, device=device)]},
        )
