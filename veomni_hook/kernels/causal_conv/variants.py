"""The variants of causal convolutions."""

from __future__ import annotations

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
    description="one pass over memory in each direction; channels next to each other, at most 4 taps",
)
_TORCH = backend(
    "torch",
    ".torch:{variant}",
    description="torch's convolution; the first positions of samples that share a row again; any device",
)
_FLA = backend(
    "fla",
    ".fla:{variant}",
    refuses=".fla:refuses",
    requires=Requirement(devices=("cuda",), triton=True, distributions=("fla_core",)),
    description="flash-linear-attention; channels are moved to the end first",
    automatic=False,
)

VARIANTS = {
    "depthwise": Variant(
        "activation(bias + sum_j weight[c, j] * x[c, t - taps + 1 + j]), zeros before a sample",
        kernels=(_TRITON, _TORCH, _FLA),
        refuses=".operand_checks:refuses",
    ),
}
OP = op("causal_conv", VARIANTS, yields="..shared.hub_functions:yields")
