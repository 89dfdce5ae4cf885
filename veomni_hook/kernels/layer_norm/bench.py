"""LayerNorm: forward reads and writes one tensor, backward reads two and writes one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.nn import functional

from veomni_hook import accelerator
from veomni_hook.kernels.problem import Problem, Results, Side, made, sides_of
from veomni_hook.kernels.slot.arguments import operand_names

__all__ = ["problems"]

EPS = 1e-5
_ACCELERATOR = (
    ("weight_before_cast", 65536, 8192),
    ("weight_before_cast", 131072, 4096),
    ("weight_before_cast", 43690, 12288),
    ("unweighted", 131072, 4096),
    ("operator_before_weight_and_bias", 4194304, 128),
    ("cast_before_weight_and_bias", 349525, 1536),
    ("weight_before_cast", 16384, 4096),
)
_CPU = (("weight_before_cast", 2048, 1024), ("unweighted", 2048, 1024))


def problems(device: str, *, quick: bool) -> Iterator[Problem]:
    """Yield every variant and size."""
    cases = _ACCELERATOR if device in accelerator.TYPES else _CPU
    for variant, rows, columns in cases[:2] if quick else cases:
        names = operand_names("layer_norm", variant)
        x = made(rows, columns, device=device)
        sides = sides_of("layer_norm", variant, device, call=_of_tensors, names=names, columns=columns)
        if variant in ("weight_before_cast", "unweighted"):
            sides["torch's operator"] = operator
        yield Problem(
            op="layer_norm",
            shape=f"{variant}, {rows} x {columns}",
            leaves=(x, *(made(columns, device=device) for name in names if name in ("weight", "bias"))),
            sides=sides,
            limit="bytes",
            work={"forward": 2 * x.nbytes, "backward": 3 * x.nbytes},
            incoming={"backward": [torch.randn_like(x)]},
        )


def operator(x: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
    """Return what torch's operator computes in one call."""
    return functional.layer_norm(x, x.shape[-1:], weight, None, EPS)


def _of_tensors(kernel: Side, *tensors: torch.Tensor, names: Sequence[str], columns: int) -> Results:
    """What ``kernel`` returns for the tensors among its operands, which have these ``names``."""
    fixed = {"eps": EPS, "normalized_shape": (columns,)}
    leaves = iter(tensors)
    return kernel(*(fixed[name] if name in fixed else next(leaves) for name in names))
