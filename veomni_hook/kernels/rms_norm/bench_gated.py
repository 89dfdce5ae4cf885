"""RMSNorm with a gate or in groups: of x and gate, forward reads both, backward writes both gradients."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import nn

from veomni_hook import accelerator
from veomni_hook.kernels.problem import Problem, Side, beside, formula, made
from veomni_hook.kernels.rms_norm.bench import EPS

__all__ = ["problems"]

# Variant, rows, columns, and how many columns have a scale of their own, where that is an operand.
_ACCELERATOR = (
    ("weight_before_cast_gated", 2097152, 128, 0),
    ("gate_before_norm", 65536, 4096, 0),
    ("gate_before_norm_grouped", 65536, 8192, 1024),
    ("cast_before_weight_gated", 2097152, 128, 0),
    ("one_plus_weight_grouped", 65536, 8192, 1024),
    ("one_plus_weight_before_norm", 131072, 4096, 0),
    ("weight_before_cast_gated", 262144, 128, 0),
)
_CPU = (("weight_before_cast_gated", 16384, 128, 0), ("gate_before_norm_grouped", 2048, 1024, 128))


def problems(device: str, *, quick: bool) -> Iterator[Problem]:
    """Yield every variant and size."""
    cases = _ACCELERATOR if device in accelerator.TYPES else _CPU
    for variant, rows, columns, group in cases[:2] if quick else cases:
        gated = "gate" in variant
        operands = [made(rows, columns, device=device) for _ in ("x", "gate")[: 1 + gated]]
        size = operands[0].nbytes
        yield Problem(
            op="rms_norm_gated",
            shape=f"{variant}, {rows} x {columns}" + (f" in groups of {group}" if group else ""),
            leaves=(*operands, made(columns, device=device)),
            sides=_sides(variant, group, device),
            limit="bytes",
            work={"forward": (2 + gated) * size, "backward": (3 + 2 * gated) * size},
            incoming={"backward": [torch.randn_like(operands[0])]},
        )


def _sides(variant: str, group: int, device: str) -> dict[str, Side]:
    options: dict[str, object] = {"eps": EPS}
    if group:
        options["group_size"] = group
    if variant.endswith("_gated"):
        options["activation"] = nn.SiLU()
    eager = partial(formula("rms_norm", variant), **options)
    found: dict[str, Side] = {"eager": eager, "compile": torch.compile(eager, dynamic=False)}
    for name, side in beside("rms_norm", variant, device).items():
        found[name] = partial(side, **options)
    return found
