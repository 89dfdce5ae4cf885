"""The variants of the gated delta rule."""

from __future__ import annotations

from dataclasses import replace

from veomni_hook.kernels.selection.declaration import Requirement, Variant
from veomni_hook.kernels.selection.table import TRITON, backend, op

__all__ = ["OP", "VARIANTS"]

_TRITON = backend(
    "triton",
    ".triton:{variant}",
    refuses=".triton:refuses",
    requires=TRITON,
    priority=10,
    traceable=True,
    description="chunk by chunk, forward and backward; bfloat16 and float16, heads of at most 256",
)
_TORCH = backend(
    "torch",
    ".torch:{variant}",
    description="chunk by chunk with torch's products, all samples at once; any device",
)
_FLA = backend(
    "fla",
    ".fla:{variant}",
    refuses=".fla:refuses",
    requires=Requirement(devices=("cuda",), triton=True, distributions=("fla_core",)),
    description="flash-linear-attention; an error instead of its backward where Triton miscompiles it",
    automatic=False,
)
_CHANNELS = replace(_TRITON, refuses=".rule:unfit")

VARIANTS = {
    "scalar_decay": Variant(
        "S = exp(g) * S + k (beta * (v - exp(g) * S^T k))^T, o = S^T q for each position; one g a head",
        kernels=(_TRITON, _TORCH, _FLA),
        refuses=".operand_checks:refuses",
    ),
    "channel_decay": Variant(
        "S = exp(g) * S + k (beta * (v - (exp(g) * S)^T k))^T, o = S^T q for each position; one g a channel",
        kernels=(_CHANNELS, _TORCH, _FLA),
        refuses=".operand_checks:refuses_channels",
    ),
}
OP = op("gated_delta_rule", VARIANTS, yields=".operand_checks:yields")
