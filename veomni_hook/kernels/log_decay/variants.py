"""The variants of decays: one per head, alone and with a sigmoid beside it, or per channel."""

from __future__ import annotations

from dataclasses import replace

from veomni_hook.kernels.selection.declaration import Variant
from veomni_hook.kernels.selection.table import ANYWHERE, RECOMPUTED, TRITON, backend, op

__all__ = ["OP", "VARIANTS"]


_TRITON = backend(
    "triton",
    ".triton:{variant}",
    refuses=".triton:refuses",
    requires=TRITON,
    priority=10,
    traceable=True,
    invariant=("cuda",),
    description="one launch in each direction, and one for the sums over positions",
)
_TORCH = backend(
    "torch",
    RECOMPUTED,
    traceable=True,
    invariant=("cpu", "cuda"),
    description="the formula in PyTorch, recomputed in the backward; saves the operands only",
    automatic=False,
)
_KERNELS = (_TRITON, _TORCH)
_OF_CHANNELS = (replace(_TRITON, refuses=".triton:refuses_channels"), _TORCH)

VARIANTS = {
    "softplus": Variant(
        "-exp(float32(log_rate)) * softplus(float32(a) + bias)",
        kernels=_KERNELS,
        refuses=".rules:refuses",
    ),
    "softplus_and_sigmoid": Variant(
        "sigmoid(b), -exp(float32(log_rate)) * softplus(float32(a) + bias)",
        kernels=_KERNELS,
        refuses=".rules:refuses_with_sigmoid",
    ),
    "channels": Variant(
        "-r * softplus(float32(x) + bias), or lower * sigmoid(r * (float32(x) + bias)), "
        "r = exp(float32(log_rate))",
        kernels=_OF_CHANNELS,
        refuses=".rules:refuses_channels",
    ),
    "channels_rounded_rate": Variant(
        "-r * softplus(float32(x) + bias), or lower * sigmoid(r * (float32(x) + bias)), "
        "r = float32(exp(log_rate))",
        kernels=_OF_CHANNELS,
        refuses=".rules:refuses_channels",
    ),
}
OP = op("log_decay", VARIANTS, invariant=ANYWHERE)
