"""The variants of norm and rotation: each is a variant of rms_norm and one of rotary.

In the formulas, ``x32`` is x in float32, ``xhat`` is ``x32 * rsqrt(mean(x32^2) + eps)`` and ``turn(n)`` is
``(-n2, n1)`` on halves.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from veomni_hook.kernels.selection.declaration import Kernel, Variant
from veomni_hook.kernels.selection.table import ANYWHERE, TRITON, backend, op

__all__ = ["OP", "Parts"]


class Parts(NamedTuple):
    """The variants that are computed one after the other."""

    norm: str
    rotation: str


_TRITON = backend(
    "triton",
    ".triton:kernel({variant})",
    refuses=".triton:refuses",
    requires=TRITON,
    priority=10,
    traceable=True,
    invariant=("cuda",),
    description="norm and rotation of query and key in one pass forward, one backward; deterministic",
)
# On an H200, rotating a part of each head in the same pass reaches 36 to 39 % of a copy's bandwidth: the norm
# and then the rotation as separate kernels are faster.
_TRITON_PARTIAL = replace(
    _TRITON, automatic=False, description=f"{_TRITON.description}; two kernels are faster"
)
_TORCH = backend(
    "torch",
    ".torch:kernel({variant})",
    traceable=True,
    invariant=("cpu",),
    description="the torch kernels of rms_norm, then upstream's rotation",
    automatic=False,
)
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


def _of(norm: str, rotation: str, fused: Kernel = _TRITON) -> Variant:
    return Variant(
        f"{_ROTATIONS[rotation]}, n = {_NORMS[norm]}",
        ".reference:of({variant})",
        kernels=(fused, _TORCH),
        refuses=".skipped_calls:refuses",
        form=Parts(norm, rotation),
    )


VARIANTS = {
    "cast_before_weight_half_split": _of("cast_before_weight", "half_split"),
    "cast_before_weight_half_split_cast_out": _of("cast_before_weight", "half_split_cast_out"),
    "cast_before_weight_half_split_partial": _of("cast_before_weight", "half_split_partial", _TRITON_PARTIAL),
    "weight_before_cast_half_split": _of("weight_before_cast", "half_split"),
    "weight_before_cast_half_split_cast_out": _of("weight_before_cast", "half_split_cast_out"),
    "weight_before_cast_half_split_partial": _of("weight_before_cast", "half_split_partial", _TRITON_PARTIAL),
    "one_plus_weight_half_split": _of("one_plus_weight", "half_split"),
    "one_plus_weight_half_split_cast_out": _of("one_plus_weight", "half_split_cast_out"),
    "one_plus_weight_half_split_partial": _of("one_plus_weight", "half_split_partial", _TRITON_PARTIAL),
}
OP = op(
    "qk_norm_rotary",
    VARIANTS,
    invariant=ANYWHERE,
    yields=".skipped_calls:chosen_apart",
    parts=("rms_norm", "rotary"),
)
