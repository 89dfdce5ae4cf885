"""The variants of hyper-connections: in front of a block, behind the last layer, and the mixture."""

from __future__ import annotations

from dataclasses import replace

from veomni_hook.kernels.selection.declaration import Variant
from veomni_hook.kernels.selection.table import RECOMPUTED, TRITON, backend, op

__all__ = ["OP", "VARIANTS"]

_TRITON = backend(
    "triton",
    ".triton:{variant}",
    refuses=".triton:refuses",
    requires=TRITON,
    priority=10,
    traceable=True,
    invariant=("cuda",),
    description="no copy of the streams; Sinkhorn's iterations again in the backward; deterministic",
)
_TORCH = backend(
    "torch",
    RECOMPUTED,
    traceable=True,
    description="the formula in PyTorch, recomputed in the backward; saves only its operands",
    automatic=False,
)

VARIANTS = {
    "sinkhorn": Variant(
        "pre, post, comb = weights(fn . norm(x)), comb doubly stochastic; post, comb, sum_n pre_n x_n",
        kernels=(_TRITON, _TORCH),
        refuses=".rules:refuses",
    ),
    "collapse": Variant(
        "sum_n (sigmoid(scale * (fn . norm(x)) + base) + eps)_n x_n",
        kernels=(_TRITON, _TORCH),
        refuses=".rules:refuses_collapse",
    ),
    "mix": Variant(
        "y_k = post_k output + sum_j comb_jk x_j",
        kernels=(
            replace(
                _TRITON,
                load=".mix:mix",
                refuses=".mix:refuses",
                description="one launch in each direction; deterministic",
            ),
            _TORCH,
        ),
        refuses=".rules:refuses_mix",
    ),
}
OP = op("hyper_connection", VARIANTS, invariant=("cpu",))
