"""The gated product of an MLP: ``activation(gate) * up`` and its variants; the projections stay modules.

Guards ask with ``slot.kernel(mlp, x, activation)``, where ``x`` is a tensor available before the projections,
and call ``kernel(gate, up, activation, ...)`` after them, with ``gate`` and ``up`` both
``[..., intermediate]``. If upstream evaluates operands in another order, they are passed by keyword. The
activation is the module's own: a kernel refuses those that it does not support.
"""

from __future__ import annotations

from veomni_hook.kernels.selection.registry import NPU, Kernel, Op, Requirement, Variant

_REFERENCE = "veomni_hook.kernels.gated_mlp.reference"
_TRITON = "veomni_hook.kernels.gated_mlp.triton"
_NPU = "veomni_hook.kernels.gated_mlp.npu"
_TORCH = "veomni_hook.kernels.gated_mlp.torch"

OP = Op(
    "gated_mlp",
    variants={
        "product": Variant("activation(gate) * up", f"{_REFERENCE}:product"),
        "product_float32": Variant(
            "(activation(float32(gate)) * float32(up)).to(gate.dtype)", f"{_REFERENCE}:product_float32"
        ),
        "clamped": Variant(
            "activation(min(gate, limit)) * clamp(up, -limit, limit)", f"{_REFERENCE}:clamped"
        ),
        "clamped_after": Variant(
            "min(activation(gate), limit) * clamp(up, -limit, limit)", f"{_REFERENCE}:clamped_after"
        ),
        "scaled_sigmoid": Variant(
            "(u + 1) * g * sigmoid(alpha * g), g = min(gate, limit), u = clamp(up, -limit, limit)",
            f"{_REFERENCE}:scaled_sigmoid",
        ),
    },
)

KERNELS = (
    *(
        Kernel(
            op="gated_mlp",
            variant=variant,
            backend="triton",
            load=f"{_TRITON}:{variant}",
            refuses=f"{_TRITON}:refuses",
            requires=Requirement(devices=("cuda",), min_capability=(8, 0), triton=True),
            priority=10,
            traceable=True,
            description="one pass forward, one backward; SiLU, GELU, ReLU (squared) or sigmoid",
        )
        for variant in OP.variants
    ),
    *(
        Kernel(
            op="gated_mlp",
            variant=variant,
            backend="npu",
            load=f"{_NPU}:{variant}",
            refuses=f"{_NPU}:refuses",
            requires=NPU,
            priority=10,
            traceable=True,
            description="npu_swiglu on concatenated gate and up; SiLU only",
        )
        for variant in ("product", "product_float32", "clamped")
    ),
    *(
        Kernel(
            op="gated_mlp",
            variant=variant,
            backend="npu",
            load=f"{_TORCH}:{variant}",
            refuses=f"{_TORCH}:refuses_others",
            requires=NPU,
            traceable=True,
            description="the formula in PyTorch, recomputed in the backward; torch_npu has no such operator",
            automatic=False,
        )
        for variant in ("clamped_after", "scaled_sigmoid")
    ),
    Kernel(
        op="gated_mlp",
        variant="product",
        backend="torch",
        load=f"{_TORCH}:gated_silu",
        refuses=f"{_TORCH}:refuses",
        loses=f"{_TORCH}:loses",
        traceable=True,
        description="SiLU; in place without gradients, else the backward recomputes one activation",
    ),
    Kernel(
        op="gated_mlp",
        variant="clamped",
        backend="torch",
        load=f"{_TORCH}:clamped_silu",
        refuses=f"{_TORCH}:refuses",
        loses=f"{_TORCH}:loses",
        traceable=True,
        description="SiLU between clamps; otherwise like product",
    ),
    *(
        Kernel(
            op="gated_mlp",
            variant=variant,
            backend="torch",
            load=f"{_TORCH}:{variant}",
            refuses=f"{_TORCH}:refuses_others",
            traceable=True,
            description="the formula in PyTorch, recomputed in the backward; saves only gate and up",
            automatic=False,
        )
        for variant in ("product_float32", "clamped_after", "scaled_sigmoid")
    ),
    Kernel(
        op="gated_mlp",
        variant="product",
        backend="liger",
        load="veomni_hook.kernels.gated_mlp.liger:product",
        refuses="veomni_hook.kernels.gated_mlp.liger:refuses",
        requires=Requirement(devices=("cuda",), triton=True, distributions=("liger_kernel",)),
        description="Liger's kernels: SiLU, tanh GELU; the backward overwrites gate and up",
        automatic=False,
    ),
)
