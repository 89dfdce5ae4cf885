"""RMSNorm of each head of queries and keys, then their rotary embedding, as one op.

An attention asks before its projections: ``slot.kernel(self, hidden_states, q_norm, k_norm, norm class,
rotary function, cos, sin, module name)``. The kernel is called after the projections and replaces both norms
and the rotary function. It gets the operands of the variant's reference function, in its order.
"""

from __future__ import annotations

from veomni_hook.kernels.selection.registry import REFERENCE, Kernel, Op, Requirement, Variant

# x32 = float32(x); xhat = x32 * rsqrt(mean(x32^2) + eps); turn(n) = (-n2, n1) on halves.
_NORMS = {
    "cast_before_weight": "weight * xhat.to(x.dtype)",
    "weight_before_cast": "(weight32 * xhat).to(x.dtype)",
    "one_plus_weight": "(xhat * (1 + weight32)).to(x.dtype)",
}
_ROTATIONS = {
    "half_split": "n * cos + turn(n) * sin",
    "half_split_cast_out": "half_split, cast to the dtype of n",
    "half_split_partial": "n * cos + turn(n) * sin for the first cos.shape[-1] numbers, else n",
}
_HERE = "veomni_hook.kernels.qk_norm_rotary"

OP = Op(
    "qk_norm_rotary",
    variants={
        f"{norm}_{rotation}": Variant(f"{turned}, n = {normed}", f"{_HERE}.reference:{norm}_{rotation}")
        for norm, normed in _NORMS.items()
        for rotation, turned in _ROTATIONS.items()
    },
    yields=f"{_HERE}.upstream:chosen_apart",
    parts=("rms_norm", "rotary"),
)

_ONE_PASS = "norm and rotation of query and key in one pass forward, one backward; deterministic"

KERNELS = (
    *(
        Kernel(
            op="qk_norm_rotary",
            variant=variant,
            backend="triton",
            load=f"{_HERE}.triton:{variant}",
            refuses=f"{_HERE}.triton:refuses",
            requires=Requirement(devices=("cuda",), min_capability=(8, 0), triton=True),
            priority=10,
            traceable=True,
            # On an H200, rotating a part of each head in the same pass reaches 36 to 39 % of a copy's
            # bandwidth: the norm and then the rotation as separate kernels are faster.
            automatic=not variant.endswith("_partial"),
            description=_ONE_PASS + ("; two kernels are faster" if variant.endswith("_partial") else ""),
        )
        for variant in OP.variants
    ),
    *(
        Kernel(
            op="qk_norm_rotary",
            variant=variant,
            backend="torch",
            load=f"{_HERE}.torch:{variant}",
            refuses=f"{_HERE}.upstream:refuses",
            traceable=True,
            description="the torch kernels of rms_norm, then upstream's rotation",
            automatic=False,
        )
        for variant in OP.variants
    ),
    *(
        Kernel(
            op="qk_norm_rotary",
            variant=variant,
            backend=REFERENCE,
            load=described.reference,
            refuses=f"{_HERE}.upstream:refuses",
            description="the formula in plain PyTorch; for checking results, not for speed",
            automatic=False,
        )
        for variant, described in OP.variants.items()
    ),
)
