"""A residual addition and the RMSNorm of its sum, in one pass.

Called with ``(residual, hidden_states, weight, eps)``; returns ``(sum, normalised)``. The sum is rounded to
its dtype, as upstream's ``residual + hidden_states``; the norm uses the rounded sum.

Guards ask with ``slot.kernel(layer, residual, hidden_states, norm, norm_class)``. A kernel skips the call of
the module ``norm``, so every kernel here refuses unless ``norm`` is a plain ``norm_class`` and nothing
observes its calls (`calls`). A kernel computes unsupported operands with its reference.
"""

from __future__ import annotations

from veomni_hook.kernels.selection.registry import NPU, REFERENCE, Kernel, Op, Requirement, Variant

_HERE = "veomni_hook.kernels.add_rms_norm"

_FORMULAS = {
    "cast_before_weight": "weight * (x32 * rs).to(x.dtype)",
    "weight_before_cast": "(weight32 * (x32 * rs)).to(x.dtype)",
    "cast_to_weight": "weight * (x32 * rs).to(weight.dtype), without the cast for a float32 weight",
    "one_plus_weight": "((x32 * rs) * (1 + weight32)).to(x.dtype)",
    "one_plus_weight_rounded": "((x32 * rs) * (1 + weight).float()).to(x.dtype)",
}

OP = Op(
    "add_rms_norm",
    variants={
        name: Variant(f"x = residual + hidden_states; {formula}", f"{_HERE}.reference:{name}")
        for name, formula in _FORMULAS.items()
    },
    yields=f"{_HERE}.calls:chosen_apart",
    parts=("rms_norm",),
)

#: The variants that Liger computes with the same casts.
_LIGER = ("cast_before_weight", "weight_before_cast", "one_plus_weight")

KERNELS = (
    *(
        Kernel(
            op="add_rms_norm",
            variant=variant,
            backend="triton",
            load=f"{_HERE}.triton:{variant}",
            refuses=f"{_HERE}.triton:refuses",
            requires=Requirement(devices=("cuda",), min_capability=(8, 0), triton=True),
            priority=10,
            traceable=True,
            description="reads the sum once; the backward adds both gradients of the sum; deterministic",
        )
        for variant in _FORMULAS
    ),
    *(
        Kernel(
            op="add_rms_norm",
            variant=variant,
            backend="npu",
            load=f"{_HERE}.npu:{variant}",
            refuses=f"{_HERE}.npu:refuses",
            requires=NPU,
            priority=10,
            traceable=True,
            description="npu_add_rms_norm"
            if variant == "cast_before_weight"
            else "an addition, then the npu kernel of rms_norm",
        )
        for variant in _FORMULAS
    ),
    *(
        Kernel(
            op="add_rms_norm",
            variant=variant,
            backend="liger",
            load=f"{_HERE}.liger:{variant}",
            refuses=f"{_HERE}.triton:refuses",
            requires=Requirement(devices=("cuda",), triton=True, distributions=("liger_kernel",)),
            description="LigerFusedAddRMSNormFunction of liger-kernel",
            automatic=False,
        )
        for variant in _LIGER
    ),
    *(
        Kernel(
            op="add_rms_norm",
            variant=variant,
            backend="torch",
            load=f"{_HERE}.torch:{variant}",
            refuses=f"{_HERE}.calls:refuses",
            traceable=True,
            description="an addition, then the torch kernel of rms_norm",
            automatic=False,
        )
        for variant in _FORMULAS
    ),
    *(
        Kernel(
            op="add_rms_norm",
            variant=variant,
            backend=REFERENCE,
            load=f"{_HERE}.reference:{variant}",
            refuses=f"{_HERE}.calls:refuses",
            description="the formula in plain PyTorch; for checking results, not for speed",
            automatic=False,
        )
        for variant in _FORMULAS
    ),
)
