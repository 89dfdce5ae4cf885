"""Decays of linear attention with the sigmoid beside them, as in a layer of Qwen3-Next, and larger ones.

Forward reads a and b, and writes the sigmoid and, in float32, the decay. Backward reads a, the sigmoid and
both gradients, and writes those of a and b.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from veomni_hook import accelerator
from veomni_hook.kernels.problem import Problem, Side, beside, formula, made

__all__ = ["problems"]

# Positions and heads. The last two are larger than a model's: there the bandwidth counts, not the launch.
_ACCELERATOR = ((16384, 32), (65536, 64), (4194304, 32), (2097152, 64))
_CPU = ((2048, 32),)
_VARIANT = "softplus_and_sigmoid"


def problems(device: str, *, quick: bool) -> Iterator[Problem]:
    """Yield every size."""
    sizes = _ACCELERATOR if device in accelerator.TYPES else _CPU
    for positions, heads in sizes[:2] if quick else sizes:
        a, b = (made(1, positions, heads, device=device) for _ in range(2))
        log_rate, bias = (made(heads, device=device) for _ in range(2))
        eager = formula("log_decay", _VARIANT)
        sides: dict[str, Side] = {"eager": eager, "compile": torch.compile(eager, dynamic=False)}
        yield Problem(
            op="log_decay",
            shape=f"{positions} x {heads}",
            leaves=(a, log_rate, bias, b),
            sides={**sides, **beside("log_decay", _VARIANT, device)},
            limit="bytes",
            work={"forward": 5 * a.nbytes, "backward": 7 * a.nbytes},
            incoming={"backward": [torch.randn_like(b), torch.randn(a.shape, device=device)]},
        )
