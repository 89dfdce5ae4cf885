"""The variants of RMSNorm.

In the formulas, ``x32`` is x in float32 and ``rs`` is the scale ``rsqrt(mean(x32^2) + eps)``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from veomni_hook.kernels.selection.declaration import NPU, Variant
from veomni_hook.kernels.selection.table import LIGER, RECOMPUTED, TRITON, backend, op

__all__ = ["OP", "VARIANTS", "Norm"]


class Norm(NamedTuple):
    """The steps after the normalisation, for ops that have a norm as a part.

    ``factor`` is ``weight``, ``one_plus`` or ``one_plus_rounded`` (1 + weight in the weight's dtype). The
    normalised values are rounded before the product to the dtype of ``x`` or ``weight``, or stay in
    ``float32``.
    """

    factor: str
    rounded_to: str


_TRITON = backend(
    "triton",
    ".triton:{variant}",
    refuses=".triton:refuses",
    requires=TRITON,
    priority=10,
    traceable=True,
    invariant=("cuda",),
    description="one pass forward, one backward; deterministic; rows of at most 32,768 values",
)
_UNWEIGHTED = replace(_TRITON, refuses=".triton:refuses_unweighted")
_BEFORE_NORM = replace(_TRITON, load=".gated:{variant}")
_GROUPED = replace(_BEFORE_NORM, refuses=".gated:refuses_grouped")
_GATE_AFTER = replace(_BEFORE_NORM, refuses=".gated:refuses_gate_after")
_GATE_BEFORE = replace(_BEFORE_NORM, refuses=".gated:refuses_gate_before")
_SCALE_ROUNDED = replace(_UNWEIGHTED, load=".rounded:{variant}")

_NPU = backend(
    "npu",
    ".npu:{variant}",
    refuses=".npu:refuses",
    requires=NPU,
    priority=10,
    traceable=True,
    description="npu_rms_norm, in float32 where the formula multiplies in float32",
)
_NPU_UNWEIGHTED = replace(_NPU, refuses=".npu:refuses_unweighted")
_NPU_GROUPED = replace(_NPU, refuses=".npu:refuses_grouped")
_NPU_GATED = replace(_NPU, refuses=".npu:refuses_gate_before")

_TORCH = backend(
    "torch",
    RECOMPUTED,
    refuses="..shared.recompute:refuses",
    traceable=True,
    invariant=("cpu",),
    description="the formula in PyTorch, recomputed in the backward; saves only its operands",
    automatic=False,
)
_TORCH_ACTIVATED = replace(_TORCH, refuses=".torch:refuses_activation")
_TORCH_ON_NPU = replace(
    _TORCH,
    backend="npu",
    requires=NPU,
    description="the formula in PyTorch, recomputed in the backward; torch_npu has no such operator",
)
_OPERATOR = backend(
    "torch",
    ".torch:rms_norm",
    refuses=".torch:refuses",
    traceable=True,
    invariant=("cpu",),
    description="torch's rms_norm without weight, then the weight, with upstream's casts",
)

_LIGER = backend(
    "liger",
    ".liger:kernel({variant})",
    refuses=".triton:refuses",
    requires=LIGER,
    description="LigerRMSNormFunction of liger-kernel",
    automatic=False,
)

VARIANTS = {
    "cast_before_weight": Variant(
        "weight * (x32 * rs).to(x.dtype)",
        kernels=(_TRITON, _NPU, _OPERATOR, _LIGER),
        form=Norm("weight", "x"),
    ),
    "weight_before_cast": Variant(
        "(weight32 * (x32 * rs)).to(x.dtype)",
        kernels=(_TRITON, _NPU, _TORCH, _LIGER),
        form=Norm("weight", "float32"),
    ),
    "cast_to_weight": Variant(
        "weight * (x32 * rs).to(weight.dtype), without the cast for a float32 weight",
        kernels=(_TRITON, _NPU, _TORCH),
        form=Norm("weight", "weight"),
    ),
    "without_cast": Variant(
        "(weight * x) * rsqrt(mean(x^2) + eps)",
        kernels=(replace(_TRITON, load=".rounded:{variant}"), _TORCH_ON_NPU, _TORCH),
    ),
    # In float32, dividing by the root rounds like multiplying by its inverse, up to the last bit.
    "divided_by_root": Variant(
        "((x32 / sqrt(mean(x32^2) + eps)) * weight32).to(x.dtype)",
        kernels=(
            replace(_TRITON, load=".triton:weight_before_cast"),
            replace(_NPU, load=".npu:weight_before_cast"),
            _TORCH,
        ),
    ),
    "one_plus_weight": Variant(
        "((x32 * rs) * (1 + weight32)).to(x.dtype)",
        kernels=(_TRITON, _NPU, _TORCH, _LIGER),
        form=Norm("one_plus", "float32"),
    ),
    "one_plus_weight_rounded": Variant(
        "((x32 * rs) * (1 + weight).float()).to(x.dtype)",
        kernels=(_TRITON, _NPU, _TORCH),
        form=Norm("one_plus_rounded", "float32"),
    ),
    "one_plus_weight_before_norm": Variant(
        "(y32 * rs(y)).to(x.dtype), y = (x32 * (1 + weight).float()).to(x.dtype)",
        kernels=(_BEFORE_NORM, _NPU, _TORCH),
    ),
    "one_plus_weight_grouped": Variant(
        "one_plus_weight, rs over groups of neighbours",
        kernels=(_GROUPED, _NPU_GROUPED, _TORCH),
    ),
    "unweighted": Variant(
        "(x32 * rs).to(x.dtype)",
        kernels=(_UNWEIGHTED, _NPU_UNWEIGHTED, _TORCH),
    ),
    "unweighted_rounded_scale": Variant(
        "x * rs.to(x.dtype)",
        kernels=(_SCALE_ROUNDED, _TORCH_ON_NPU, _TORCH),
    ),
    "inverse_rms": Variant(
        "rs.to(x.dtype)",
        kernels=(_SCALE_ROUNDED, _TORCH_ON_NPU, _TORCH),
    ),
    "cast_before_weight_gated": Variant(
        "((weight * (x32 * rs).to(x.dtype)) * activation(gate32)).to(x.dtype)",
        kernels=(_GATE_AFTER, _NPU_GATED, _TORCH_ACTIVATED),
    ),
    "weight_before_cast_gated": Variant(
        "((weight32 * (x32 * rs)) * activation(gate32)).to(x.dtype)",
        kernels=(_GATE_AFTER, _NPU_GATED, _TORCH_ACTIVATED),
    ),
    "gate_before_norm": Variant(
        "cast_before_weight of x32 * silu(gate32)",
        kernels=(_GATE_BEFORE, _NPU_GATED, _TORCH),
    ),
    "gate_before_norm_grouped": Variant(
        "gate_before_norm, rs over groups of neighbours",
        kernels=(_GROUPED, _NPU_GROUPED, _TORCH),
    ),
}
OP = op("rms_norm", VARIANTS, invariant=("cpu",))
