"""RMS normalisation of the last dimension: ``x * rsqrt(mean(x^2) + eps)``, optionally with weight and gate.

Guards ask and call with the operands of the variant's reference function, in its order:
``slot.kernel(self, hidden_states, weight, eps)``. In the formulas, ``x32`` is x in float32 and ``rs`` is the
scale ``rsqrt(mean(x32^2) + eps)``.
"""

from __future__ import annotations

from veomni_hook.kernels.selection.registry import NPU, Kernel, Op, Requirement, Variant

_FORMULAS = {
    "cast_before_weight": "weight * (x32 * rs).to(x.dtype)",
    "weight_before_cast": "(weight32 * (x32 * rs)).to(x.dtype)",
    "cast_to_weight": "weight * (x32 * rs).to(weight.dtype), without the cast for a float32 weight",
    "without_cast": "(weight * x) * rsqrt(mean(x^2) + eps)",
    "divided_by_root": "((x32 / sqrt(mean(x32^2) + eps)) * weight32).to(x.dtype)",
    "one_plus_weight": "((x32 * rs) * (1 + weight32)).to(x.dtype)",
    "one_plus_weight_rounded": "((x32 * rs) * (1 + weight).float()).to(x.dtype)",
    "one_plus_weight_before_norm": "(y32 * rs(y)).to(x.dtype), y = (x32 * (1 + weight).float()).to(x.dtype)",
    "one_plus_weight_grouped": "one_plus_weight, rs over groups of neighbours",
    "unweighted": "(x32 * rs).to(x.dtype)",
    "unweighted_rounded_scale": "x * rs.to(x.dtype)",
    "inverse_rms": "rs.to(x.dtype)",
    "cast_before_weight_gated": "((weight * (x32 * rs).to(x.dtype)) * activation(gate32)).to(x.dtype)",
    "weight_before_cast_gated": "((weight32 * (x32 * rs)) * activation(gate32)).to(x.dtype)",
    "gate_before_norm": "cast_before_weight of x32 * silu(gate32)",
    "gate_before_norm_grouped": "gate_before_norm, rs over groups of neighbours",
}

OP = Op(
    "rms_norm",
    variants={
        name: Variant(formula, f"veomni_hook.kernels.rms_norm.reference:{name}")
        for name, formula in _FORMULAS.items()
    },
)

_HERE = "veomni_hook.kernels.rms_norm"
_REFUSES, _UNWEIGHTED = f"{_HERE}.triton:refuses", f"{_HERE}.triton:refuses_unweighted"
#: The functions of the Triton kernels and their rules. Division by the root uses the multiplying kernel: both
#: round alike in float32.
_FUSED = {
    "cast_before_weight": ("triton:cast_before_weight", _REFUSES),
    "weight_before_cast": ("triton:weight_before_cast", _REFUSES),
    "cast_to_weight": ("triton:cast_to_weight", _REFUSES),
    "without_cast": ("rounded:without_cast", _REFUSES),
    "divided_by_root": ("triton:weight_before_cast", _REFUSES),
    "one_plus_weight": ("triton:one_plus_weight", _REFUSES),
    "one_plus_weight_rounded": ("triton:one_plus_weight_rounded", _REFUSES),
    "one_plus_weight_before_norm": ("gated:one_plus_weight_before_norm", _REFUSES),
    "one_plus_weight_grouped": ("gated:one_plus_weight_grouped", f"{_HERE}.gated:refuses_grouped"),
    "unweighted": ("triton:unweighted", _UNWEIGHTED),
    "unweighted_rounded_scale": ("rounded:unweighted_rounded_scale", _UNWEIGHTED),
    "inverse_rms": ("rounded:inverse_rms", _UNWEIGHTED),
    "cast_before_weight_gated": ("gated:cast_before_weight_gated", f"{_HERE}.gated:refuses_gate_after"),
    "weight_before_cast_gated": ("gated:weight_before_cast_gated", f"{_HERE}.gated:refuses_gate_after"),
    "gate_before_norm": ("gated:gate_before_norm", f"{_HERE}.gated:refuses_gate_before"),
    "gate_before_norm_grouped": ("gated:gate_before_norm_grouped", f"{_HERE}.gated:refuses_grouped"),
}

#: The variants that use torch_npu's operator, and their rules.
_BY_OPERATOR = {
    **dict.fromkeys(
        (
            "cast_before_weight",
            "weight_before_cast",
            "cast_to_weight",
            "divided_by_root",
            "one_plus_weight",
            "one_plus_weight_rounded",
            "one_plus_weight_before_norm",
        ),
        "refuses",
    ),
    "unweighted": "refuses_unweighted",
    "one_plus_weight_grouped": "refuses_grouped",
    "cast_before_weight_gated": "refuses_gate_after",
    "weight_before_cast_gated": "refuses_gate_after",
    "gate_before_norm": "refuses_gate_before",
    "gate_before_norm_grouped": "refuses_grouped",
}

#: The variants with an activation as an operand.
_ACTIVATED = ("cast_before_weight_gated", "weight_before_cast_gated")

KERNELS = (
    *(
        Kernel(
            op="rms_norm",
            variant=variant,
            backend="triton",
            load=f"{_HERE}.{function}",
            refuses=refuses,
            requires=Requirement(devices=("cuda",), min_capability=(8, 0), triton=True),
            priority=10,
            traceable=True,
            description="one pass forward, one backward; deterministic; rows of at most 32,768 values",
        )
        for variant, (function, refuses) in _FUSED.items()
    ),
    *(
        Kernel(
            op="rms_norm",
            variant=variant,
            backend="npu",
            load=f"{_HERE}.npu:{variant}",
            refuses=f"{_HERE}.npu:{rule}",
            requires=NPU,
            priority=10,
            traceable=True,
            description="npu_rms_norm, in float32 where the formula multiplies in float32",
        )
        for variant, rule in _BY_OPERATOR.items()
    ),
    *(
        Kernel(
            op="rms_norm",
            variant=variant,
            backend="npu",
            load=f"{_HERE}.torch:{variant}",
            refuses=f"{_HERE}.torch:refuses_others",
            requires=NPU,
            traceable=True,
            description="the formula in PyTorch, recomputed in the backward; torch_npu has no such operator",
            automatic=False,
        )
        for variant in _FORMULAS
        if variant not in _BY_OPERATOR
    ),
    Kernel(
        op="rms_norm",
        variant="cast_before_weight",
        backend="torch",
        load="veomni_hook.kernels.rms_norm.torch:rms_norm",
        refuses="veomni_hook.kernels.rms_norm.torch:refuses",
        traceable=True,
        description="torch's rms_norm without weight, then the weight, with upstream's casts",
    ),
    *(
        Kernel(
            op="rms_norm",
            variant=variant,
            backend="torch",
            load=f"{_HERE}.torch:{variant}",
            refuses=f"{_HERE}.torch:{'refuses_activation' if variant in _ACTIVATED else 'refuses_others'}",
            traceable=True,
            description="the formula in PyTorch, recomputed in the backward; saves only its operands",
            automatic=False,
        )
        for variant in _FORMULAS
        if variant != "cast_before_weight"
    ),
    *(
        Kernel(
            op="rms_norm",
            variant=variant,
            backend="liger",
            load=f"veomni_hook.kernels.rms_norm.liger:{variant}",
            refuses=f"{_HERE}.triton:refuses",
            requires=Requirement(devices=("cuda",), triton=True, distributions=("liger_kernel",)),
            description="LigerRMSNormFunction of liger-kernel",
            automatic=False,
        )
        for variant in ("cast_before_weight", "weight_before_cast", "one_plus_weight")
    ),
)
