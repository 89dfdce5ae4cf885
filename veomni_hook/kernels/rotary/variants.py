"""The variants of rotary embedding.

In the formulas, ``turn(x)`` is ``(-x2, x1)``. On halves, ``x = (x1, x2)``; on pairs, x1 and x2 are neighbours
in head_dim. ``x32`` is x in float32.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from veomni_hook.kernels.rotary.forms import (
    COUPLE,
    COUPLED_PAIRS,
    HALVES,
    ROTATED_HALVES,
    ROTATED_PAIRS,
    Form,
    in_float32,
)
from veomni_hook.kernels.selection.declaration import NPU, Variant
from veomni_hook.kernels.selection.table import ANYWHERE, LIGER, TRITON, backend, checked_reference, op

__all__ = ["FUSED", "OP", "Fused"]


class Fused(NamedTuple):
    """What the fused kernels rotate: the formula, and which operands a call has (`signatures`, `calls`)."""

    form: Form
    call: str = "both"


_FUSED = (
    backend(
        "triton",
        ".triton:kernel({variant})",
        refuses=".operand_rules:rule({variant})",
        requires=TRITON,
        priority=10,
        traceable=True,
        invariant=("cuda",),
        description="query and key in one pass, forward and backward, any strides; rounds like upstream",
    ),
    backend(
        "npu",
        ".npu:kernel({variant})",
        refuses=".npu:rule({variant})",
        requires=NPU,
        priority=10,
        traceable=True,
        description="npu_rotary_mul for each tensor, forward and backward; tables at full width",
    ),
)
_TORCH_HALVES = backend(
    "torch",
    ".torch:rotary",
    refuses=".torch:refuses",
    loses=".torch:loses",
    traceable=True,
    invariant=("cpu", "cuda"),
    description="rotates halves in place, forward and backward; bitwise equal to upstream",
)
_TORCH = backend(
    "torch",
    ".reference:{variant}",
    refuses=".called_function:refuses",
    traceable=True,
    invariant=("cpu", "cuda"),
    description="the formula in PyTorch; saves only cos and sin for the backward",
    automatic=False,
)
_LIGER = backend(
    "liger",
    ".liger:rotary",
    refuses=".liger:refuses",
    requires=LIGER,
    description="Liger's kernel, which rotates copies in place; reads one half of cos and sin",
    automatic=False,
)
_REFERENCE = checked_reference(".called_function:refuses")
_FORMULA = (_TORCH, _REFERENCE)
_FORMULA_WIDE = (
    replace(_TORCH, refuses=".called_function:refuses_wide"),
    checked_reference(".called_function:refuses_wide"),
)
#: For a method's body, at whose start no other function could have been substituted.
_FORMULA_IN_METHOD = (replace(_TORCH, refuses=None),)

VARIANTS = {
    "half_split": Variant(
        "x * cos + turn(x) * sin on halves, over the full head_dim",
        kernels=(*_FUSED, _TORCH_HALVES, _LIGER, _REFERENCE),
        form=Fused(ROTATED_HALVES),
    ),
    "half_split_cast_out": Variant(
        "half_split, cast to the dtype of x",
        kernels=(*_FUSED, *_FORMULA),
        form=Fused(ROTATED_HALVES._replace(cast=True)),
    ),
    "half_split_fp32": Variant(
        "half_split of x32, cos32, sin32, cast to the dtype of x",
        kernels=(*_FUSED, *_FORMULA_WIDE),
        form=Fused(in_float32(ROTATED_HALVES)),
    ),
    "half_split_fp32_as_query": Variant(
        "half_split of q32 and k32, both cast to the dtype of q",
        kernels=(*_FUSED, *_FORMULA_WIDE),
        form=Fused(in_float32(ROTATED_HALVES)),
    ),
    "half_split_reversed": Variant(
        "x * cos - turn(x) * sin on halves",
        kernels=(*_FUSED, *_FORMULA),
        form=Fused(ROTATED_HALVES._replace(backwards=True)),
    ),
    "half_split_partial": Variant(
        "half_split of the first cos.shape[-1] numbers of head_dim; the rest stays",
        kernels=(*_FUSED, *_FORMULA),
        form=Fused(ROTATED_HALVES._replace(reach="leading")),
    ),
    "half_split_partial_optional_key": Variant(
        "half_split_partial, of q alone where k is None",
        kernels=(*_FUSED, *_FORMULA),
        form=Fused(ROTATED_HALVES._replace(reach="leading"), "key_last"),
    ),
    "half_split_after_prefix": Variant(
        "half_split of the last sin.shape[-2] positions; positions before them stay",
        kernels=_FORMULA,
    ),
    "half_split_gathered": Variant(
        "half_split with cos[position_ids], sin[position_ids]",
        kernels=(*_FUSED, *_FORMULA),
        form=Fused(ROTATED_HALVES, "gathered"),
    ),
    "half_split_gathered_with_value": Variant(
        "half_split_gathered of q, k and v",
        kernels=_FORMULA,
    ),
    "half_split_sections": Variant(
        "half_split with cos, sin of three axes, section by section in turn",
        kernels=_FORMULA,
    ),
    "half_split_single": Variant(
        "half_split of one tensor",
        kernels=(*_FUSED, *_FORMULA),
        form=Fused(ROTATED_HALVES, "one"),
    ),
    "half_split_packed_heads": Variant(
        "half_split of every head of [batch, length, num_heads * head_size]",
        kernels=_FORMULA_IN_METHOD,
    ),
    "half_split_first_positions_single": Variant(
        "half_split of one tensor with as many positions of cos, sin",
        kernels=_FORMULA,
    ),
    "half_split_of_angles_fp32_single": Variant(
        "half_split of one tensor in float32 by cos(angles), sin(angles)",
        kernels=_FORMULA_WIDE,
    ),
    "sections": Variant(
        "cos or sin of three axes as one table, section by section in turn",
        kernels=_FORMULA_IN_METHOD,
    ),
    "half_width_halves": Variant(
        "(x1*cos - x2*sin, x2*cos + x1*sin) on halves; cos, sin of half the width",
        kernels=(*_FUSED, *_FORMULA),
        form=Fused(ROTATED_HALVES._replace(table=COUPLE, ratio=2)),
    ),
    "half_width_halves_single": Variant(
        "half_width_halves of one tensor; cos, sin broadcast",
        kernels=(*_FUSED, *_FORMULA),
        form=Fused(ROTATED_HALVES._replace(table=COUPLE, ratio=2), "one_broadcast"),
    ),
    "half_width_pairs": Variant(
        "(x1*cos - x2*sin, x2*cos + x1*sin) on pairs; cos, sin of half the width",
        kernels=(*_FUSED, *_FORMULA),
        form=Fused(COUPLED_PAIRS._replace(ratio=2)),
    ),
    "half_width_pairs_single": Variant(
        "half_width_pairs of one tensor; cos, sin broadcast",
        kernels=(*_FUSED, *_FORMULA),
        form=Fused(COUPLED_PAIRS._replace(ratio=2), "one_broadcast"),
    ),
    "pairs": Variant(
        "x * cos + turn(x) * sin on pairs, over the full head_dim",
        kernels=(*_FUSED, *_FORMULA),
        form=Fused(ROTATED_PAIRS),
    ),
    "pairs_fp32": Variant(
        "pairs of x32, cos32, sin32, cast to the dtype of x",
        kernels=(*_FUSED, *_FORMULA_WIDE),
        form=Fused(in_float32(ROTATED_PAIRS)),
    ),
    "pairs_fp32_as_query": Variant(
        "pairs of q32 and k32, both cast to the dtype of q",
        kernels=(*_FUSED, *_FORMULA_WIDE),
        form=Fused(in_float32(ROTATED_PAIRS)),
    ),
    "pairs_fp32_broadcast": Variant(
        "pairs of x32, cast to the dtype of x; cos, sin broadcast",
        kernels=(*_FUSED, *_FORMULA_WIDE),
        form=Fused(in_float32(ROTATED_PAIRS), "both_broadcast"),
    ),
    "pairs_partial": Variant(
        "pairs of the first cos.shape[-1] numbers of head_dim; the rest stays",
        kernels=(*_FUSED, *_FORMULA),
        form=Fused(ROTATED_PAIRS._replace(reach="leading")),
    ),
    "pairs_repeated": Variant(
        "pairs with the first half of cos, sin, each number twice",
        kernels=(*_FUSED, *_FORMULA),
        form=Fused(COUPLED_PAIRS),
    ),
    "pairs_repeated_fp32": Variant(
        "pairs_repeated of q32 and k32, both cast to the dtype of q",
        kernels=(*_FUSED, *_FORMULA_WIDE),
        form=Fused(COUPLED_PAIRS._replace(wide=True, cast=True)),
    ),
    "pairs_partial_repeated": Variant(
        "pairs_partial with the first half of cos, sin, each number twice",
        kernels=(*_FUSED, *_FORMULA),
        form=Fused(COUPLED_PAIRS._replace(reach="leading")),
    ),
    "pairs_doubled_single": Variant(
        "pairs of one tensor with cos, sin of half the width, each number twice",
        kernels=(*_FUSED, *_FORMULA),
        form=Fused(COUPLED_PAIRS._replace(ratio=2), "one_heads_last"),
    ),
    "pairs_trailing_fp32_single": Variant(
        "pairs of the last numbers of x32, cast to the dtype of x",
        kernels=(*_FUSED, *_FORMULA_WIDE),
        form=Fused(COUPLED_PAIRS._replace(ratio=2, reach="trailing", wide=True, cast=True), "one"),
    ),
    "pairs_partial_fp64_single": Variant(
        "pairs_partial of one tensor in float64, cast to the dtype of x",
        kernels=_FORMULA,
    ),
    "pairs_to_halves": Variant(
        "half_width_halves of pairs: (x1*cos - x2*sin, x2*cos + x1*sin), x1 in front of x2",
        kernels=(*_FUSED, *_FORMULA),
        form=Fused(COUPLED_PAIRS._replace(pairs_out=False)),
    ),
    "pairs_to_halves_optional_key": Variant(
        "pairs_to_halves; no k gives none",
        kernels=(*_FUSED, *_FORMULA),
        form=Fused(COUPLED_PAIRS._replace(pairs_out=False), "optional_key"),
    ),
    "pairs_to_halves_full_width": Variant(
        "half_split of (x1, x2) from pairs, by the full width of cos, sin",
        kernels=(*_FUSED, *_FORMULA),
        form=Fused(COUPLED_PAIRS._replace(pairs_out=False, table=HALVES)),
    ),
    "pairs_matrix": Variant(
        "pairs times [[cos, -sin], [sin, cos]], products summed",
        kernels=(*_FUSED, *_FORMULA),
        form=Fused(COUPLED_PAIRS._replace(together=True)),
    ),
    "complex_pairs": Variant(
        "pairs of x32 as complex numbers times freqs, cast to the dtype of x",
        kernels=(*_FUSED, *_FORMULA),
        form=Fused(in_float32(COUPLED_PAIRS._replace(ratio=2)), "complex"),
    ),
    "complex_pairs_moved": Variant(
        "complex_pairs with freqs brought to the device of q",
        kernels=(*_FUSED, *_FORMULA),
        form=Fused(in_float32(COUPLED_PAIRS._replace(ratio=2)), "complex_moved"),
    ),
}
#: By variant, those with a fused kernel.
FUSED: dict[str, Fused] = {name: row.form for name, row in VARIANTS.items() if row.form is not None}
OP = op("rotary", VARIANTS, invariant=ANYWHERE)
