"""RMSNorm whose scale is rounded before it is used, and the scale alone, which is one number a row."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from veomni_hook import accelerator
from veomni_hook.kernels.problem import Problem, Side, beside, formula, made
from veomni_hook.kernels.rms_norm.bench import EPS

__all__ = ["problems"]

_ACCELERATOR = (
    ("without_cast", 131072, 4096),
    ("inverse_rms", 131072, 4096),
    ("unweighted_rounded_scale", 131072, 4096),
    ("without_cast", 4194304, 128),
    ("without_cast", 16384, 4096),
)
_CPU = (("without_cast", 2048, 1024), ("inverse_rms", 2048, 1024))


def problems(device: str, *, quick: bool) -> Iterator[Problem]:
    """Yield every variant and size."""
    cases = _ACCELERATOR if device in accelerator.TYPES else _CPU
    for variant, rows, columns in cases[:2] if quick else cases:
        x = made(rows, columns, device=device)
        weights = (made(columns, device=device),) if variant == "without_cast" else ()
        alone = variant == "inverse_rms"
        yield Problem(
            op="rms_norm_rounded",
            shape=f"{variant}, {rows} x {columns}",
            leaves=(x, *weights),
            sides=_sides(variant, device),
            limit="bytes",
            work={"forward": (1 if alone else 2) * x.nbytes, "backward": (2 if alone else 3) * x.nbytes},
            incoming={"backward": [torch.randn_like(x[:, :1] if alone else x)]},
        )


def _sides(variant: str, device: str) -> dict[str, Side]:
    eager = partial(formula("rms_norm", variant), eps=EPS)
    found: dict[str, Side] = {"eager": eager, "compile": torch.compile(eager, dynamic=False)}
    for name, side in beside("rms_norm", variant, device).items():
        found[name] = partial(side, eps=EPS)
    return found
