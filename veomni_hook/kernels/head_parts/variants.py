"""The variants of parts of heads: the split, whose gradient is a join, and the join."""

from __future__ import annotations

from veomni_hook.kernels.selection.declaration import Variant
from veomni_hook.kernels.selection.table import ANYWHERE, TRITON, backend, op

__all__ = ["OP", "VARIANTS"]


def _parts(formula: str, name: str) -> Variant:
    triton = backend(
        "triton",
        ".triton:{variant}",
        refuses=f".triton:refuses_{name}",
        loses=f".triton:loses_{name}",
        requires=TRITON,
        priority=10,
        traceable=True,
        invariant=("cuda",),
        description="one pass where parts are joined, in the memory order of the projection",
    )
    return Variant(formula, kernels=(triton,), refuses=f".rules:refuses_{name}")


VARIANTS = {
    "joined": _parts("[x | y] along the last dimension", "joined"),
    "split": _parts("x[..., :n], x[..., n:], whose gradients are joined", "split"),
}
OP = op("head_parts", VARIANTS, invariant=ANYWHERE)
