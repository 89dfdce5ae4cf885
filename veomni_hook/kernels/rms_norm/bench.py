"""RMSNorm: forward reads and writes one tensor, backward reads two and writes one."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace

import torch

from veomni_hook import accelerator
from veomni_hook.kernels.problem import Problem, Side, beside, made, peer

__all__ = ["problems"]

EPS = 1e-6
_ACCELERATOR = (
    (131072, 4096),
    (4194304, 128),
    (262144, 2048),
    (65536, 8192),
    (131072, 5120),
    (174762, 3072),
    (209715, 2560),
    (43690, 12288),
    (32768, 16384),
    (26214, 20480),
    (16384, 32768),
    (16384, 4096),
)
_CPU = ((2048, 1024), (2048, 4096), (16384, 128))


def problems(device: str, *, quick: bool) -> Iterator[Problem]:
    """Yield every size."""
    sizes = _ACCELERATOR if device in accelerator.TYPES else _CPU
    quack, absent = peer(device, "quack", partial(quack_norm, eps=EPS))
    for rows, columns in sizes[:2] if quick else sizes:
        x, weight = made(rows, columns, device=device), made(columns, device=device)
        yield Problem(
            op="rms_norm",
            shape=f"{rows} x {columns}",
            leaves=(x, weight),
            sides={**_sides(device), **quack},
            limit="bytes",
            work={"forward": 2 * x.nbytes, "backward": 3 * x.nbytes},
            incoming={"backward": [torch.randn_like(x)]},
            spoils=frozenset({"liger"}),
            absent=absent,
        )


def _sides(device: str) -> dict[str, Side]:
    found: dict[str, Side] = {"eager": upstream, "compile": torch.compile(upstream, dynamic=False)}
    for name, side in beside("rms_norm", "cast_before_weight", device).items():
        found[name] = partial(side, eps=EPS)
    return found


def upstream(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return what the installed Qwen3's RMSNorm returns."""
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    normalised: torch.Tensor = Qwen3RMSNorm.forward(SimpleNamespace(weight=weight, variance_epsilon=EPS), x)
    return normalised


def quack_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return ``weight * xhat`` of rows ``[rows, columns]``, multiplied in float32."""
    from quack.rmsnorm import rmsnorm

    y: torch.Tensor = rmsnorm(x, weight, eps=eps)
    return y
