"""The variants of index scores: with and without relu, and by how upstream adds up the heads."""

from __future__ import annotations

from veomni_hook.kernels.selection.declaration import Variant
from veomni_hook.kernels.selection.table import TRITON, backend, checked_reference, op

__all__ = ["OP", "VARIANTS"]

_KERNELS = (
    backend(
        "triton",
        ".triton:{variant}",
        refuses=".triton:refuses",
        requires=TRITON,
        priority=10,
        traceable=True,
        invariant=("cuda",),
        description="adds up the heads in registers; another order of sums than upstream's",
    ),
    backend(
        "torch",
        ".torch:{variant}",
        refuses=".rules:refuses",
        traceable=True,
        description="the formula in PyTorch for some queries at a time; bits are upstream's up to 256 MiB",
    ),
    checked_reference(".rules:refuses"),
)

VARIANTS = {
    "relu_matmul": Variant("weights @ relu(float32(query) @ float32(key) * scale)", kernels=_KERNELS),
    "relu_sum": Variant("sum_h(weights * (relu(float32(query) @ float32(key)) * scale))", kernels=_KERNELS),
    "relu_einsum": Variant(
        "einsum(relu(einsum(float32(query), float32(key)) * scale), weights)", kernels=_KERNELS
    ),
    "einsum": Variant("einsum(einsum(float32(query), float32(key)) * scale, weights)", kernels=_KERNELS),
}
OP = op("index_scores", VARIANTS)
