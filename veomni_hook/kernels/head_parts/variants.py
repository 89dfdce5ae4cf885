"""The variants of parts of heads: the split, whose gradient is a join, and the join."""

from __future__ import annotations

from veomni_hook.kernels.selection.declaration import Variant
from veomni_hook.kernels.selection.table import ANYWHERE, TRITON, backend, op

__all__ = ["OP", "VARIANTS"]


_TRITON = backend(
    "triton",
    ".triton:{variant}",
    refuses=".triton:refuses",
    loses=".triton:loses",
    requires=TRITON,
    priority=10,
    traceable=True,
    invariant=("cuda",),
    description="one pass where parts are joined, in the memory order of the projection",
)

VARIANTS = {
    "joined": Variant(
        "[x | y] along the last dimension", kernels=(_TRITON,), refuses=".rules:refuses_{variant}"
    ),
    "split": Variant(
        "x[..., :n], x[..., n:], whose gradients are joined",
        kernels=(_TRITON,),
        refuses=".rules:refuses_{variant}",
    ),
}
OP = op("head_parts", VARIANTS, invariant=ANYWHERE)
