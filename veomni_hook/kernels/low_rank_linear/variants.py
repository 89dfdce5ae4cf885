"""The variants of linear layers with low-rank terms."""

from __future__ import annotations

from veomni_hook.kernels.selection.declaration import Variant
from veomni_hook.kernels.selection.table import ANYWHERE, backend, op

__all__ = ["OP"]

_TORCH = backend(
    "torch",
    ".torch:{variant}",
    loses=".rules:loses",
    description="terms are added in place, forward and backward; no float32 copies for float32 adapters",
)

VARIANTS = {
    "product_added": Variant(
        "linear(x) + sum over adapters of scale * up(down(dropout(x)))",
        kernels=(_TORCH,),
        refuses=".rules:refuses",
    ),
}
OP = op("low_rank_linear", VARIANTS, invariant=ANYWHERE, remarks=".rules:remark")
