"""RMS normalisation of the last dimension: ``x * rsqrt(mean(x^2) + eps)``, with weight and gate or without.

Asked and called with the operands of the variant's reference function, in its order:
``slot.kernel(self, hidden_states, weight, eps)``. In the formulas ``x32`` is x in float32 and
``rs`` the scale ``rsqrt(mean(x32^2) + eps)``.
"""

from __future__ import annotations

from veomni_hook.kernels.registry import Kernel, Op, Requirement, Variant

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

_TRITON = "veomni_hook.kernels.rms_norm.triton"
#: Variants with a Triton kernel, and its function; a quotient by the root rounds like a product in float32.
_FUSED = {
    "cast_before_weight": "cast_before_weight",
    "weight_before_cast": "weight_before_cast",
    "cast_to_weight": "cast_to_weight",
    "divided_by_root": "weight_before_cast",
    "one_plus_weight": "one_plus_weight",
    "one_plus_weight_rounded": "one_plus_weight_rounded",
    "unweighted": "unweighted",
}

KERNELS = (
    *(
        Kernel(
            op="rms_norm",
            variant=variant,
            backend="triton",
            load=f"{_TRITON}:{function}",
            refuses=f"{_TRITON}:refuses_unweighted" if variant == "unweighted" else f"{_TRITON}:refuses",
            requires=Requirement(devices=("cuda",), min_capability=(8, 0), triton=True),
            priority=10,
            description="one pass forward, one backward, deterministic; rows of at most 32,768 values",
        )
        for variant, function in _FUSED.items()
    ),
    Kernel(
        op="rms_norm",
        variant="cast_before_weight",
        backend="torch",
        load="veomni_hook.kernels.rms_norm.torch:rms_norm",
        refuses="veomni_hook.kernels.rms_norm.torch:refuses",
        description="torch's rms_norm without weight, then the weight: the upstream casts",
    ),
)
