"""The variants of LayerNorm.

In the formulas, ``x32`` is x in float32, ``m`` is ``mean(x32)`` and ``rs`` is the scale
``rsqrt(mean((x32 - m)^2) + eps)``.
"""

from __future__ import annotations

from dataclasses import replace

from veomni_hook.kernels.selection.declaration import Variant
from veomni_hook.kernels.selection.table import RECOMPUTED, TRITON, backend, op

__all__ = ["OP", "VARIANTS"]

_TRITON = backend(
    "triton",
    ".triton:{variant}",
    refuses=".triton:refuses({variant})",
    requires=TRITON,
    priority=10,
    traceable=True,
    invariant=("cuda",),
    description="one pass forward, one backward; deterministic; rows of at most 32,768 values",
)
#: Where torch's operator is the alternative, which costs the host less.
_LARGE = replace(_TRITON, loses=".triton:loses")
_TORCH = backend(
    "torch",
    ".torch:{variant}",
    refuses=".torch:refuses({variant})",
    traceable=True,
    invariant=("cpu",),
    description="torch's layer_norm in the input's dtype, which computes in float32",
)
_RECOMPUTED = backend(
    "torch",
    RECOMPUTED,
    refuses="..shared.recompute:refuses",
    traceable=True,
    invariant=("cpu",),
    description="the formula in PyTorch, recomputed in the backward; saves only its operands",
    automatic=False,
)

VARIANTS = {
    "weight_before_cast": Variant(
        "(weight32 * ((x32 - m) * rs)).to(x.dtype)",
        kernels=(_LARGE, _TORCH),
    ),
    # In float32, dividing by the root rounds like multiplying by its inverse, up to the last bit.
    "cast_before_weight_and_bias": Variant(
        "weight * ((x32 - m) / sqrt(mean((x32 - m)^2) + eps)).to(x.dtype) + bias",
        kernels=(_TRITON, _RECOMPUTED),
    ),
    "operator_before_weight_and_bias": Variant(
        "layer_norm(x) * weight + bias",
        kernels=(_TRITON, _RECOMPUTED),
    ),
    "weight_and_bias_before_cast": Variant(
        "layer_norm(x32, weight, bias).to(x.dtype)",
        kernels=(_TRITON, _RECOMPUTED),
    ),
    "unweighted": Variant(
        "layer_norm(x32).to(x.dtype)",
        kernels=(_LARGE, _TORCH),
    ),
}
OP = op("layer_norm", VARIANTS, invariant=("cpu",))
