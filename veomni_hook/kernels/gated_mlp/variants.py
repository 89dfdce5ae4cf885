"""The variants of the gated product."""

from __future__ import annotations

from dataclasses import replace

from veomni_hook.kernels.selection.declaration import NPU, Variant
from veomni_hook.kernels.selection.table import ANYWHERE, LIGER, RECOMPUTED, TRITON, backend, op

__all__ = ["OP"]

_TRITON = backend(
    "triton",
    ".triton:{variant}",
    refuses=".triton:refuses",
    requires=TRITON,
    priority=10,
    traceable=True,
    invariant=("cuda",),
    description="one pass forward, one backward; SiLU, GELU, ReLU (squared) or sigmoid",
)
_NPU = backend(
    "npu",
    ".npu:{variant}",
    refuses=".npu:refuses",
    requires=NPU,
    priority=10,
    traceable=True,
    description="npu_swiglu on concatenated gate and up; SiLU only",
)
_TORCH = backend(
    "torch",
    RECOMPUTED,
    refuses=".torch:refuses_others",
    traceable=True,
    invariant=("cpu", "cuda"),
    description="the formula in PyTorch, recomputed in the backward; saves only gate and up",
    automatic=False,
)
_TORCH_ON_NPU = replace(
    _TORCH,
    backend="npu",
    requires=NPU,
    description="the formula in PyTorch, recomputed in the backward; torch_npu has no such operator",
)
_TORCH_SILU = backend(
    "torch",
    ".torch:gated_silu",
    refuses=".torch:refuses",
    loses=".torch:loses",
    traceable=True,
    invariant=("cpu", "cuda"),
    description="SiLU; in place without gradients, else the backward recomputes one activation",
)
_TORCH_CLAMPED_SILU = replace(
    _TORCH_SILU, load=".torch:clamped_silu", description="SiLU between clamps; otherwise like product"
)
_LIGER = backend(
    "liger",
    ".liger:{variant}",
    refuses=".liger:refuses",
    requires=LIGER,
    description="Liger's kernels: SiLU, tanh GELU; the backward overwrites gate and up",
    automatic=False,
)

VARIANTS = {
    "product": Variant(
        "activation(gate) * up",
        kernels=(_TRITON, _NPU, _TORCH_SILU, _LIGER),
    ),
    "product_float32": Variant(
        "(activation(float32(gate)) * float32(up)).to(gate.dtype)",
        kernels=(_TRITON, _NPU, _TORCH),
    ),
    "clamped": Variant(
        "activation(min(gate, limit)) * clamp(up, -limit, limit)",
        kernels=(_TRITON, _NPU, _TORCH_CLAMPED_SILU),
    ),
    "clamped_after": Variant(
        "min(activation(gate), limit) * clamp(up, -limit, limit)",
        kernels=(_TRITON, _TORCH_ON_NPU, _TORCH),
    ),
    "scaled_sigmoid": Variant(
        "(u + 1) * g * sigmoid(alpha * g), g = min(gate, limit), u = clamp(up, -limit, limit)",
        kernels=(_TRITON, _TORCH_ON_NPU, _TORCH),
    ),
}
OP = op("gated_mlp", VARIANTS, invariant=ANYWHERE, prepares=".projected:prepare")
