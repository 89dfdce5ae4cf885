"""The variants of decays: one per head, alone and with a sigmoid beside it, or per channel."""

from __future__ import annotations

from veomni_hook.kernels.selection.declaration import Variant
from veomni_hook.kernels.selection.table import ANYWHERE, TRITON, backend, op

__all__ = ["OP", "VARIANTS"]


def _decay(formula: str, refuses: str, *, of_triton: str = "refuses") -> Variant:
    triton = backend(
        "triton",
        ".triton:{variant}",
        refuses=f".triton:{of_triton}",
        requires=TRITON,
        priority=10,
        traceable=True,
        invariant=("cuda",),
        description="one launch in each direction, and one for the sums over positions",
    )
    torch = backend(
        "torch",
        ".torch:{variant}",
        traceable=True,
        invariant=("cpu", "cuda"),
        description="the formula in PyTorch, recomputed in the backward; saves the operands only",
        automatic=False,
    )
    return Variant(formula, kernels=(triton, torch), refuses=f".rules:{refuses}")


def _channels(rate: str) -> Variant:
    formula = f"-r * softplus(float32(x) + bias), or lower * sigmoid(r * (float32(x) + bias)), r = {rate}"
    return _decay(formula, "refuses_channels", of_triton="refuses_channels")


VARIANTS = {
    "softplus": _decay("-exp(float32(log_rate)) * softplus(float32(a) + bias)", "refuses"),
    "softplus_and_sigmoid": _decay(
        "sigmoid(b), -exp(float32(log_rate)) * softplus(float32(a) + bias)", "refuses_with_sigmoid"
    ),
    "channels": _channels("exp(float32(log_rate))"),
    "channels_rounded_rate": _channels("float32(exp(log_rate))"),
}
OP = op("log_decay", VARIANTS, invariant=ANYWHERE)
