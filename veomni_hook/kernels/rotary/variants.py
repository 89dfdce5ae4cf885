"""The variants of rotary embedding.

In the formulas, ``turn(x)`` is ``(-x2, x1)``. On halves, ``x = (x1, x2)``; on pairs, x1 and x2 are neighbours
in head_dim. ``x32`` is x in float32.
"""

from __future__ import annotations

from functools import partial
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
from veomni_hook.kernels.selection.table import ANYWHERE, LIGER, TRITON, backend, op

__all__ = ["FUSED", "OP", "Fused"]


class Fused(NamedTuple):
    """What the fused kernels rotate: the formula, and which operands a call has (`signatures`)."""

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
# No kernel takes the place of another function. A method has no such place: nothing is called at its start.
_REFUSES, _REFUSES_WIDE = ".called_function:refuses", ".called_function:refuses_wide"


def _fused(formula: str, form: Form, call: str = "both", refuses: str = _REFUSES) -> Variant:
    return Variant(formula, kernels=(*_FUSED, _TORCH), refuses=refuses, form=Fused(form, call))


_fused_wide = partial(_fused, refuses=_REFUSES_WIDE)
_plain = partial(Variant, kernels=(_TORCH,), refuses=_REFUSES)

VARIANTS = {
    "half_split": Variant(
        "x * cos + turn(x) * sin on halves, over the full head_dim",
        kernels=(*_FUSED, _TORCH_HALVES, _LIGER),
        refuses=_REFUSES,
        form=Fused(ROTATED_HALVES),
    ),
    "half_split_cast_out": _fused("half_split, cast to the dtype of x", ROTATED_HALVES._replace(cast=True)),
    "half_split_fp32": _fused_wide(
        "half_split of x32, cos32, sin32, cast to the dtype of x", in_float32(ROTATED_HALVES)
    ),
    "half_split_fp32_as_query": _fused_wide(
        "half_split of q32 and k32, both cast to the dtype of q", in_float32(ROTATED_HALVES)
    ),
    "half_split_reversed": _fused(
        "x * cos - turn(x) * sin on halves", ROTATED_HALVES._replace(backwards=True)
    ),
    "half_split_partial": _fused(
        "half_split of the first cos.shape[-1] numbers of head_dim; the rest stays",
        ROTATED_HALVES._replace(reach="leading"),
    ),
    "half_split_partial_optional_key": _fused(
        "half_split_partial, of q alone where k is None", ROTATED_HALVES._replace(reach="leading"), "key_last"
    ),
    "half_split_after_prefix": _plain(
        "half_split of the last sin.shape[-2] positions; positions before them stay"
    ),
    "half_split_gathered": _fused(
        "half_split with cos[position_ids], sin[position_ids]", ROTATED_HALVES, "gathered"
    ),
    "half_split_gathered_with_value": _plain("half_split_gathered of q, k and v"),
    "half_split_sections": _plain("half_split with cos, sin of three axes, section by section in turn"),
    "half_split_single": _fused("half_split of one tensor", ROTATED_HALVES, "one"),
    "half_split_packed_heads": _plain(
        "half_split of every head of [batch, length, num_heads * head_size]", refuses=None
    ),
    "half_split_first_positions_single": _plain(
        "half_split of one tensor with as many positions of cos, sin"
    ),
    "half_split_of_angles_fp32_single": _plain(
        "half_split of one tensor in float32 by cos(angles), sin(angles)", refuses=_REFUSES_WIDE
    ),
    "sections": _plain("cos or sin of three axes as one table, section by section in turn", refuses=None),
    "half_width_halves": _fused(
        "(x1*cos - x2*sin, x2*cos + x1*sin) on halves; cos, sin of half the width",
        ROTATED_HALVES._replace(table=COUPLE, ratio=2),
    ),
    "half_width_halves_single": _fused(
        "half_width_halves of one tensor; cos, sin broadcast",
        ROTATED_HALVES._replace(table=COUPLE, ratio=2),
        "one_broadcast",
    ),
    "half_width_pairs": _fused(
        "(x1*cos - x2*sin, x2*cos + x1*sin) on pairs; cos, sin of half the width",
        COUPLED_PAIRS._replace(ratio=2),
    ),
    "half_width_pairs_single": _fused(
        "half_width_pairs of one tensor; cos, sin broadcast", COUPLED_PAIRS._replace(ratio=2), "one_broadcast"
    ),
    "pairs": _fused("x * cos + turn(x) * sin on pairs, over the full head_dim", ROTATED_PAIRS),
    "pairs_fp32": _fused_wide(
        "pairs of x32, cos32, sin32, cast to the dtype of x", in_float32(ROTATED_PAIRS)
    ),
    "pairs_fp32_as_query": _fused_wide(
        "pairs of q32 and k32, both cast to the dtype of q", in_float32(ROTATED_PAIRS)
    ),
    "pairs_fp32_broadcast": _fused_wide(
        "pairs of x32, cast to the dtype of x; cos, sin broadcast",
        in_float32(ROTATED_PAIRS),
        "both_broadcast",
    ),
    "pairs_partial": _fused(
        "pairs of the first cos.shape[-1] numbers of head_dim; the rest stays",
        ROTATED_PAIRS._replace(reach="leading"),
    ),
    "pairs_repeated": _fused("pairs with the first half of cos, sin, each number twice", COUPLED_PAIRS),
    "pairs_repeated_fp32": _fused_wide(
        "pairs_repeated of q32 and k32, both cast to the dtype of q",
        COUPLED_PAIRS._replace(wide=True, cast=True),
    ),
    "pairs_partial_repeated": _fused(
        "pairs_partial with the first half of cos, sin, each number twice",
        COUPLED_PAIRS._replace(reach="leading"),
    ),
    "pairs_doubled_single": _fused(
        "pairs of one tensor with cos, sin of half the width, each number twice",
        COUPLED_PAIRS._replace(ratio=2),
        "one_heads_last",
    ),
    "pairs_trailing_fp32_single": _fused_wide(
        "pairs of the last numbers of x32, cast to the dtype of x",
        COUPLED_PAIRS._replace(ratio=2, reach="trailing", wide=True, cast=True),
        "one",
    ),
    "pairs_partial_fp64_single": _plain("pairs_partial of one tensor in float64, cast to the dtype of x"),
    "pairs_to_halves": _fused(
        "half_width_halves of pairs: (x1*cos - x2*sin, x2*cos + x1*sin), x1 in front of x2",
        COUPLED_PAIRS._replace(pairs_out=False),
    ),
    "pairs_to_halves_optional_key": _fused(
        "pairs_to_halves; no k gives none", COUPLED_PAIRS._replace(pairs_out=False), "optional_key"
    ),
    "pairs_to_halves_full_width": _fused(
        "half_split of (x1, x2) from pairs, by the full width of cos, sin",
        COUPLED_PAIRS._replace(pairs_out=False, table=HALVES),
    ),
    "pairs_matrix": _fused(
        "pairs times [[cos, -sin], [sin, cos]], products summed", COUPLED_PAIRS._replace(together=True)
    ),
    "complex_pairs": _fused(
        "pairs of x32 as complex numbers times freqs, cast to the dtype of x",
        in_float32(COUPLED_PAIRS._replace(ratio=2)),
        "complex",
    ),
    "complex_pairs_moved": _fused(
        "complex_pairs with freqs brought to the device of q",
        in_float32(COUPLED_PAIRS._replace(ratio=2)),
        "complex_moved",
    ),
}
#: By variant, those with a fused kernel.
FUSED: dict[str, Fused] = {name: row.form for name, row in VARIANTS.items() if row.form is not None}
OP = op("rotary", VARIANTS, invariant=ANYWHERE)
