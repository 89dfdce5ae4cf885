"""Rotary position embedding of queries and keys, or of one tensor.

Call sites ask through ``slot.at(self, upstream)``. Kernels get the operands of the variant's reference,
usually ``kernel(q, k, cos, sin, unsqueeze_dim)``. Their rules also get the upstream function as last operand,
so that a kernel that transformers' own ``use_kernels`` put in its place is respected.
"""

from __future__ import annotations

from veomni_hook.kernels.selection.registry import NPU, REFERENCE, Kernel, Op, Requirement, Variant

_REFERENCES = "veomni_hook.kernels.rotary.reference"

# turn(x) = (-x2, x1); halves: x = (x1, x2); pairs: x1, x2 are neighbours in head_dim; x32 = float32(x).
_FORMULAS = {
    "half_split": "x * cos + turn(x) * sin on halves, over the full head_dim",
    "half_split_cast_out": "half_split, cast to the dtype of x",
    "half_split_fp32": "half_split of x32, cos32, sin32, cast to the dtype of x",
    "half_split_fp32_as_query": "half_split of q32 and k32, both cast to the dtype of q",
    "half_split_reversed": "x * cos - turn(x) * sin on halves",
    "half_split_partial": "half_split of the first cos.shape[-1] numbers of head_dim; the rest stays",
    "half_split_partial_optional_key": "half_split_partial, of q alone where k is None",
    "half_split_after_prefix": "half_split of the last sin.shape[-2] positions; positions before them stay",
    "half_split_gathered": "half_split with cos[position_ids], sin[position_ids]",
    "half_split_gathered_with_value": "half_split_gathered of q, k and v",
    "half_split_sections": "half_split with cos, sin of three axes, section by section in turn",
    "half_split_single": "half_split of one tensor",
    "half_split_packed_heads": "half_split of every head of [batch, length, num_heads * head_size]",
    "half_split_first_positions_single": "half_split of one tensor with as many positions of cos, sin",
    "half_split_of_angles_fp32_single": "half_split of one tensor in float32 by cos(angles), sin(angles)",
    "sections": "cos or sin of three axes as one table, section by section in turn",
    "half_width_halves": "(x1*cos - x2*sin, x2*cos + x1*sin) on halves; cos, sin of half the width",
    "half_width_halves_single": "half_width_halves of one tensor; cos, sin broadcast",
    "half_width_pairs": "(x1*cos - x2*sin, x2*cos + x1*sin) on pairs; cos, sin of half the width",
    "half_width_pairs_single": "half_width_pairs of one tensor; cos, sin broadcast",
    "pairs": "x * cos + turn(x) * sin on pairs, over the full head_dim",
    "pairs_fp32": "pairs of x32, cos32, sin32, cast to the dtype of x",
    "pairs_fp32_as_query": "pairs of q32 and k32, both cast to the dtype of q",
    "pairs_fp32_broadcast": "pairs of x32, cast to the dtype of x; cos, sin broadcast",
    "pairs_partial": "pairs of the first cos.shape[-1] numbers of head_dim; the rest stays",
    "pairs_repeated": "pairs with the first half of cos, sin, each number twice",
    "pairs_repeated_fp32": "pairs_repeated of q32 and k32, both cast to the dtype of q",
    "pairs_partial_repeated": "pairs_partial with the first half of cos, sin, each number twice",
    "pairs_doubled_single": "pairs of one tensor with cos, sin of half the width, each number twice",
    "pairs_trailing_fp32_single": "pairs of the last numbers of x32, cast to the dtype of x",
    "pairs_partial_fp64_single": "pairs_partial of one tensor in float64, cast to the dtype of x",
    "pairs_to_halves": "half_width_halves of pairs: (x1*cos - x2*sin, x2*cos + x1*sin), x1 in front of x2",
    "pairs_to_halves_optional_key": "pairs_to_halves; no k gives none",
    "pairs_to_halves_full_width": "half_split of (x1, x2) from pairs, by the full width of cos, sin",
    "pairs_matrix": "pairs times [[cos, -sin], [sin, cos]], products summed",
    "complex_pairs": "pairs of x32 as complex numbers times freqs, cast to the dtype of x",
    "complex_pairs_moved": "complex_pairs with freqs brought to the device of q",
}

# Asked at the start of a method's body, where no other function could have been substituted.
_IN_METHODS = ("half_split_packed_heads", "sections")

OP = Op(
    "rotary",
    variants={name: Variant(formula, f"{_REFERENCES}:{name}") for name, formula in _FORMULAS.items()},
)

_TRITON = "veomni_hook.kernels.rotary.triton"
_NPU = "veomni_hook.kernels.rotary.npu"
_CALLS = "veomni_hook.kernels.rotary.calls"
#: Variants with a Triton and an NPU kernel, with its function and its rule for operands.
_FUSED = {
    "half_split": ("half_split", "refuses"),
    "half_split_cast_out": ("half_split_cast_out", "refuses"),
    "half_split_fp32": ("half_split_fp32", "refuses"),
    "half_split_fp32_as_query": ("half_split_fp32", "refuses"),
    "half_split_reversed": ("half_split_reversed", "refuses"),
    "half_split_partial": ("half_split_partial", "refuses_partial"),
    "half_split_partial_optional_key": ("half_split_partial_optional_key", "refuses_partial_optional_key"),
    "half_split_gathered": ("half_split_gathered", "refuses_gathered"),
    "half_split_single": ("half_split_single", "refuses_single"),
    "half_width_halves": ("half_width_halves", "refuses_half_width"),
    "half_width_halves_single": ("half_width_halves_single", "refuses_half_width_single_broadcast"),
    "half_width_pairs": ("half_width_pairs", "refuses_half_width"),
    "half_width_pairs_single": ("half_width_pairs_single", "refuses_half_width_single_broadcast"),
    "pairs": ("pairs", "refuses"),
    "pairs_fp32": ("pairs_fp32", "refuses"),
    "pairs_fp32_as_query": ("pairs_fp32", "refuses"),
    "pairs_fp32_broadcast": ("pairs_fp32_broadcast", "refuses_broadcast"),
    "pairs_partial": ("pairs_partial", "refuses_partial"),
    "pairs_repeated": ("pairs_repeated", "refuses"),
    "pairs_repeated_fp32": ("pairs_repeated_fp32", "refuses"),
    "pairs_partial_repeated": ("pairs_partial_repeated", "refuses_partial"),
    "pairs_doubled_single": ("pairs_doubled_single", "refuses_half_width_single"),
    "pairs_trailing_fp32_single": ("pairs_trailing_fp32_single", "refuses_partial_half_width_single"),
    "pairs_to_halves": ("pairs_to_halves", "refuses"),
    "pairs_to_halves_optional_key": ("pairs_to_halves_optional_key", "refuses_optional_key"),
    "pairs_to_halves_full_width": ("pairs_to_halves_full_width", "refuses"),
    "pairs_matrix": ("pairs_matrix", "refuses"),
    "complex_pairs": ("complex_pairs", "refuses_complex"),
    "complex_pairs_moved": ("complex_pairs_moved", "refuses_complex"),
}


def _rule(name: str) -> str | None:
    """Return the rule that checks calls of an unmodified formula."""
    if name in _IN_METHODS:
        return None
    return f"veomni_hook.kernels.rotary.upstream:refuses{'_wide' if 'fp32' in name else ''}"


KERNELS = (
    *(
        Kernel(
            op="rotary",
            variant=variant,
            backend="triton",
            load=f"{_TRITON}:{function}",
            refuses=f"{_CALLS}:{rule}",
            requires=Requirement(devices=("cuda",), min_capability=(8, 0), triton=True),
            priority=10,
            traceable=True,
            description="query and key in one pass, forward and backward, any strides; rounds like upstream",
        )
        for variant, (function, rule) in _FUSED.items()
    ),
    *(
        Kernel(
            op="rotary",
            variant=variant,
            backend="npu",
            load=f"{_NPU}:{function}",
            refuses=f"{_NPU}:{rule}",
            requires=NPU,
            priority=10,
            traceable=True,
            description="npu_rotary_mul for each tensor, forward and backward; tables at full width",
        )
        for variant, (function, rule) in _FUSED.items()
    ),
    Kernel(
        op="rotary",
        variant="half_split",
        backend="torch",
        load="veomni_hook.kernels.rotary.torch:rotary",
        refuses="veomni_hook.kernels.rotary.torch:refuses",
        loses="veomni_hook.kernels.rotary.torch:loses",
        traceable=True,
        description="rotates halves in place, forward and backward; bitwise equal to upstream",
    ),
    *(
        Kernel(
            op="rotary",
            variant=name,
            backend="torch",
            load=f"{_REFERENCES}:{name}",
            refuses=_rule(name),
            traceable=True,
            description="the formula in PyTorch; saves only cos and sin for the backward",
            automatic=False,
        )
        for name in _FORMULAS
        if name != "half_split"
    ),
    Kernel(
        op="rotary",
        variant="half_split",
        backend="liger",
        load="veomni_hook.kernels.rotary.liger:rotary",
        refuses="veomni_hook.kernels.rotary.liger:refuses",
        requires=Requirement(devices=("cuda",), triton=True, distributions=("liger_kernel",)),
        description="Liger's kernel, which rotates copies in place; reads one half of cos and sin",
        automatic=False,
    ),
    *(
        Kernel(
            op="rotary",
            variant=name,
            backend=REFERENCE,
            load=f"{_REFERENCES}:{name}",
            refuses=_rule(name),
            description="the formula in plain PyTorch; for checking results, not for speed",
            automatic=False,
        )
        for name in _FORMULAS
        if name not in _IN_METHODS
    ),
)
