"""A residual addition and the RMSNorm of its sum: forward reads two tensors and writes two."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from veomni_hook import accelerator
from veomni_hook.kernels.problem import Problem, Side, beside, made, peer
from veomni_hook.kernels.rms_norm import bench as rms_norm
from veomni_hook.kernels.rms_norm.bench import EPS

__all__ = ["problems"]

_ACCELERATOR = ((131072, 4096), (16384, 4096), (65536, 8192), (131072, 5120))
_CPU = ((2048, 1024), (2048, 4096))


def problems(device: str, *, quick: bool) -> Iterator[Problem]:
    """Yield every size."""
    sizes = _ACCELERATOR if device in accelerator.TYPES else _CPU
    quack, absent = peer(device, "quack", partial(quack_addition, eps=EPS))
    for rows, columns in sizes[:2] if quick else sizes:
        residual, x = (made(rows, columns, device=device) for _ in "rx")
        yield Problem(
            op="add_rms_norm",
            shape=f"{rows} x {columns}",
            leaves=(residual, x, made(columns, device=device)),
            sides={**_sides(device), **quack},
            limit="bytes",
            # Backward reads the sum and both gradients, and writes one for both addends.
            work={"forward": 4 * x.nbytes, "backward": 4 * x.nbytes},
            incoming={"backward": [torch.randn_like(x) for _ in "sn"]},
            spoils=frozenset({"liger"}),
            absent=absent,
        )


def _sides(device: str) -> dict[str, Side]:
    eager = partial(_apart, rms_norm.upstream)
    found: dict[str, Side] = {"eager": eager, "compile": torch.compile(eager, dynamic=False)}
    norms = beside("rms_norm", "cast_before_weight", device)
    if "ours" in norms:
        found["ours, one by one"] = partial(_apart, partial(norms["ours"], eps=EPS))
    for name, side in beside("add_rms_norm", "cast_before_weight", device).items():
        found[name] = partial(side, eps=EPS)
    return found


def _apart(
    norm: Side, residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    total = residual + x
    normalised = norm(total, weight)
    assert isinstance(normalised, torch.Tensor)  # noqa: S101
    return total, normalised


def quack_addition(
    residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of rows ``[rows, columns]`` and its norm."""
    from quack.rmsnorm import rmsnorm

    normalised, total = rmsnorm(x, weight, residual=residual, eps=eps, prenorm=True)
    return total, normalised
