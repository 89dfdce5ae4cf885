"""RMS normalisation over the last dimension: ``x * rsqrt(mean(x^2) + eps)`` and a weight.

Called as ``kernel(hidden_states, weight, eps)`` with ``[..., hidden]`` and ``[hidden]``.
"""

from __future__ import annotations

from veomni_hook.kernels.registry import Kernel, Op, Variant

OP = Op(
    "rms_norm",
    variants={
        "cast_before_weight": Variant(
            "weight * (x32 * rsqrt(mean(x32^2) + eps)).to(x.dtype), x32 = float32(x)",
            "veomni_hook.kernels.rms_norm.reference:rms_norm",
        ),
    },
)

KERNELS = (
    Kernel(
        op="rms_norm",
        variant="cast_before_weight",
        backend="torch",
        load="veomni_hook.kernels.rms_norm.torch:rms_norm",
        refuses="veomni_hook.kernels.rms_norm.torch:refuses",
        description="torch's rms_norm without weight, then the weight: the upstream casts",
    ),
)
