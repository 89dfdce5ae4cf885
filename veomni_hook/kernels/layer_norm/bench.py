"""LayerNorm: forward reads and writes one tensor, backward reads two and writes one."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional

from veomni_hook import accelerator
from veomni_hook.kernels.problem import Problem, Side, beside, formula, made
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
        names = [name for name in operand_names("layer_norm", variant) if name in ("weight", "bias")]
        x = made(rows, columns, device=device)
        yield Problem(
            op="layer_norm",
            shape=f"{variant}, {rows} x {columns}",
            leaves=(x, *(made(columns, device=device) for _ in names)),
            sides=_sides(variant, columns, device),
            limit="bytes",
            work={"forward": 2 * x.nbytes, "backward": 3 * x.nbytes},
            incoming={"backward": [torch.randn_like(x)]},
        )


def _sides(variant: str, columns: int, device: str) -> dict[str, Side]:
    eager = _of_tensors(formula("layer_norm", variant), variant, columns)
    found: dict[str, Side] = {"eager": eager, "compile": torch.compile(eager, dynamic=False)}
    if variant in ("weight_before_cast", "unweighted"):
        found["torch's operator"] = operator
    for name, side in beside("layer_norm", variant, device).items():
        found[name] = _of_tensors(side, variant, columns)
    return found


def operator(x: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
    """Return what torch's operator computes in one call."""
    return functional.layer_norm(x, x.shape[-1:], weight, None, EPS)


def _of_tensors(side: Side, variant: str, columns: int) -> Side:
    """``side`` as a function of the tensors among its operands, in their order."""
    fixed = {"eps": EPS, "normalized_shape": (columns,)}
    names = operand_names("layer_norm", variant)

    def call(*tensors: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        given = iter(tensors)
        return side(*(fixed[name] if name in fixed else next(given) for name in names))

    return call
