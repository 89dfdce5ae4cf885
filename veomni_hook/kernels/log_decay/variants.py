"""The variants of decays: alone, and with a sigmoid beside it."""

from __future__ import annotations

from veomni_hook.kernels.selection.declaration import Variant
from veomni_hook.kernels.selection.table import TRITON, backend, checked_reference, op

__all__ = ["OP", "VARIANTS"]


def _decay(formula: str, refuses: str) -> Variant:
    triton = backend(
        "triton",
        ".triton:{variant}",
        refuses=f".triton:{refuses}",
        requires=TRITON,
        priority=10,
        traceable=True,
        invariant=("cuda",),
        description="one launch in each direction, and one for the sums over positions",
    )
    torch = backend(
        "torch",
        ".torch:{variant}",
        refuses=f".rules:{refuses}",
        traceable=True,
        invariant=("cpu", "cuda"),
        description="the formula in PyTorch, recomputed in the backward; saves the operands only",
        automatic=False,
    )
    return Variant(formula, kernels=(triton, torch, checked_reference(f".rules:{refuses}")))


VARIANTS = {
    "softplus": _decay("-exp(float32(log_rate)) * softplus(float32(a) + bias)", "refuses"),
    "softplus_and_sigmoid": _decay(
        "sigmoid(b), -exp(float32(log_rate)) * softplus(float32(a) + bias)", "refuses_with_sigmoid"
    ),
}
OP = op("log_decay", VARIANTS)
