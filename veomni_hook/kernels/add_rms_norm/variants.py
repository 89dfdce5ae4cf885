"""The variants of the addition and its norm: they are named after variants of rms_norm."""

from __future__ import annotations

from dataclasses import replace

from veomni_hook.kernels.rms_norm.variants import VARIANTS as NORMS
from veomni_hook.kernels.selection.declaration import NPU, Kernel, Variant
from veomni_hook.kernels.selection.table import ANYWHERE, LIGER, TRITON, backend, op

__all__ = ["OP"]

_TRITON = backend(
    "triton",
    ".triton:kernel({variant})",
    refuses=".triton:refuses",
    requires=TRITON,
    priority=10,
    traceable=True,
    invariant=("cuda",),
    description="reads the sum once; the backward adds both gradients of the sum; deterministic",
)
_NPU = backend(
    "npu",
    ".npu:apart({variant})",
    refuses=".npu:refuses",
    requires=NPU,
    priority=10,
    traceable=True,
    description="an addition, then the npu kernel of rms_norm",
)
_OPERATOR = replace(_NPU, load=".npu:{variant}", description="npu_add_rms_norm")
_LIGER = backend(
    "liger",
    ".liger:kernel({variant})",
    refuses=".triton:refuses",
    requires=LIGER,
    description="LigerFusedAddRMSNormFunction of liger-kernel",
    automatic=False,
)
_TORCH = backend(
    "torch",
    ".torch:kernel({variant})",
    traceable=True,
    invariant=("cpu",),
    description="an addition, then the torch kernel of rms_norm",
    automatic=False,
)


def _of(norm: str, *kernels: Kernel) -> Variant:
    return Variant(
        f"x = residual + hidden_states; {NORMS[norm].formula}",
        ".reference:of({variant})",
        kernels=(*kernels, _TORCH),
        refuses=".skipped_calls:refuses",
        form=NORMS[norm].form,
    )


VARIANTS = {
    "cast_before_weight": _of("cast_before_weight", _TRITON, _OPERATOR, _LIGER),
    "weight_before_cast": _of("weight_before_cast", _TRITON, _NPU, _LIGER),
    "cast_to_weight": _of("cast_to_weight", _TRITON, _NPU),
    "one_plus_weight": _of("one_plus_weight", _TRITON, _NPU, _LIGER),
    "one_plus_weight_rounded": _of("one_plus_weight_rounded", _TRITON, _NPU),
}
OP = op(
    "add_rms_norm", VARIANTS, invariant=ANYWHERE, yields=".skipped_calls:chosen_apart", parts=("rms_norm",)
)
