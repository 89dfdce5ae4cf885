"""Calls of rms_norm."""

import torch
from torch.nn import functional

from tests.kernels.contract import Case, Refusal, in_order

EPS = 1e-3
SHAPES = [(3, 5, 7), (2, 0, 8), (6,), (129, 33), (2, 3, 4, 128), (2, 1, 1, 1, 1, 1, 1, 2, 4)]
#: The operator multiplies before it rounds.
ROUNDED_INSIDE = {("rounds", "npu"): "torch_npu's operator rounds once"}
#: torch's silu on a CPU computes what does not fill its vectors by another formula: rows with a gate are multiples of these.
WHOLE = 64
#: Rows in one block, in two, in parts, and of odd lengths.
GPU = [(64, columns) for columns in (128, 4096, 12288, 130)]
GPU_PARTS = [(64, 20480), (64, 32768)]


def operands(variant, shape, dtype, others):
    width = shape[-1]
    made = {
        "hidden_states": torch.randn(shape).to(dtype),
        "gate": torch.randn(shape).to(dtype),
        "weight": (torch.rand(width) + 0.5).to(others),
        "eps": EPS,
        "group_size": next(size for size in range(max(width // 2, 1), 0, -1) if width % size == 0),
        "activation": functional.silu,
    }
    return in_order("rms_norm", variant, made)


#: Beside operands: values that are rounded, scales of groups (of one column in the first shape), and on an NPU what
#: operators in front of the norm's keep.
KEPT = {
    "cast_before_weight": {"torch": 1},
    "one_plus_weight_before_norm": {"npu": 1},
    "one_plus_weight_grouped": {"triton": 1, "npu": 2},
    "gate_before_norm": {"npu": 3},
    "gate_before_norm_grouped": {"triton": 1, "npu": 4},
}


def case(variant):
    # Upstream's code cannot make groups of nothing.
    shapes = SHAPES if variant != "one_plus_weight_grouped" else [each for each in SHAPES if 0 not in each]
    kept = KEPT.get(variant, {"npu": 2} if variant.endswith("_gated") else {})
    return Case(
        lambda *of: operands(variant, *of),
        shapes,
        batch=(64, 3 * WHOLE if "gate" in variant else 130),
        gpu=[*GPU, *(GPU_PARTS if variant == "cast_before_weight" else ())],
        deep=(2, 3, 4, 6),
        rows=("hidden_states", "gate") if "gate" in variant else ("hidden_states",),
        exact=() if variant == "cast_before_weight" else ("torch",),
        unlike=ROUNDED_INSIDE if "cast_before_weight" in variant or variant == "cast_to_weight" else {},
        kept=kept,
    )


REFUSED = [
    Refusal(
        "float64",
        {"hidden_states": torch.randn(2, 8).double()},
        ["cast_before_weight"],
        ["triton", "npu", "torch"],
    )
]
