"""The variants of activations of several operators: each rounds its steps in another order."""

from __future__ import annotations

from veomni_hook.kernels.selection.declaration import Variant
from veomni_hook.kernels.selection.table import ANYWHERE, RECOMPUTED, TRITON, backend, op

__all__ = ["OP", "VARIANTS"]

_TRITON = backend(
    "triton",
    ".triton:kernel({variant})",
    refuses=".triton:refuses",
    requires=TRITON,
    priority=10,
    traceable=True,
    invariant=("cuda",),
    description="one pass forward, one backward; saves x alone",
)
_TORCH = backend(
    "torch",
    RECOMPUTED,
    refuses="..shared.recompute:refuses",
    traceable=True,
    invariant=("cpu", "cuda"),
    description="the formula in PyTorch, recomputed in the backward; saves x alone",
    automatic=False,
)

VARIANTS = {
    "gelu_tanh_cubed": Variant(
        "0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3)))", kernels=(_TRITON, _TORCH)
    ),
    "gelu_tanh_factored": Variant(
        "0.5 * x * (1 + tanh(sqrt(2 / pi) * x * (1 + 0.044715 * x * x)))", kernels=(_TRITON, _TORCH)
    ),
    "quick_gelu": Variant("x * sigmoid(1.702 * x)", kernels=(_TRITON, _TORCH)),
    "relu_squared": Variant("max(x, 0)^2", kernels=(_TRITON, _TORCH)),
}
OP = op("activation", VARIANTS, invariant=ANYWHERE)
