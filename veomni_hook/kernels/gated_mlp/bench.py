"""The gated middle of an MLP: forward reads two tensors and writes one, backward three and two."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import nn
from torch.nn import functional

from veomni_hook import accelerator
from veomni_hook.kernels.problem import Problem, Side, beside, made, peer

__all__ = ["problems"]

_ACCELERATOR = ((16384, 12288), (32768, 3072), (65536, 14336))
_CPU = ((2048, 3072), (4096, 8192))


def problems(device: str, *, quick: bool) -> Iterator[Problem]:
    """Yield every size."""
    sizes = _ACCELERATOR if device in accelerator.TYPES else _CPU
    _, absent = peer(device, "quack", "its activation is a part of a product of matrices")
    for rows, columns in sizes[:2] if quick else sizes:
        gate, up = (made(rows, columns, device=device) for _ in "gu")
        yield Problem(
            op="gated_mlp",
            shape=f"{rows} x {columns}",
            leaves=(gate, up),
            sides=_sides(device),
            limit="bytes",
            work={"forward": 3 * gate.nbytes, "backward": 5 * gate.nbytes},
            incoming={"backward": [torch.randn_like(gate)]},
            spoils=frozenset({"liger"}),
            absent=absent,
        )


def _sides(device: str) -> dict[str, Side]:
    found: dict[str, Side] = {"eager": upstream, "compile": torch.compile(upstream, dynamic=False)}
    for name, side in beside("gated_mlp", "product", device).items():
        found[name] = partial(side, activation=nn.SiLU())
    return found


def upstream(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return the middle of upstream's gated MLP."""
    return functional.silu(gate) * up
