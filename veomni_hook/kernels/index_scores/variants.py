"""The variants of index scores: with and without relu, and by how upstream adds up the heads."""

from __future__ import annotations

from functools import partial

from veomni_hook.kernels.selection.declaration import Variant
from veomni_hook.kernels.selection.table import TRITON, backend, op

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
        traceable=True,
        description="the formula in PyTorch for some queries at a time; bits are upstream's up to 256 MiB",
    ),
)

_scores = partial(Variant, kernels=_KERNELS, refuses=".rules:refuses")

VARIANTS = {
    "relu_matmul": _scores("weights @ relu(float32(query) @ float32(key) * scale)"),
    "relu_sum": _scores("sum_h(weights * (relu(float32(query) @ float32(key)) * scale))"),
    "relu_einsum": _scores("einsum(relu(einsum(float32(query), float32(key)) * scale), weights)"),
    "einsum": _scores("einsum(einsum(float32(query), float32(key)) * scale, weights)"),
}
OP = op("index_scores", VARIANTS)
