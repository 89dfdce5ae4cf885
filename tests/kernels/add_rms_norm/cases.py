"""Calls of add_rms_norm."""

from dataclasses import replace

import torch

from tests.kernels.contract import Case
from tests.kernels.rms_norm.cases import EPS, GPU, GPU_PARTS, ROUNDED_INSIDE, SHAPES
from veomni_hook.kernels.selection.registry import registry


def operands(shape, dtype, others):
    return {
        "residual": torch.randn(shape).to(dtype),
        "hidden_states": torch.randn(shape).to(dtype),
        "weight": (torch.rand(shape[-1]) + 0.5).to(others),
        "eps": EPS,
    }


CASE = Case(
    operands,
    SHAPES[:-1],
    batch=(64, 130),
    gpu=GPU,
    deep=(2, 3, 4, 6),
    rows=("residual", "hidden_states"),
    # A rule is asked about the layer and its norm; what does not fit is computed by the formula.
    rule=None,
    unlike=ROUNDED_INSIDE
    | {("dtypes", "npu"): "the rule on modules refuses float64; other dtypes: test_npu"},
    rereads={"triton": (0,), "npu": (0,), "torch": (0,)},
)
CASES = dict.fromkeys(registry.ops()["add_rms_norm"].variants, CASE)
# torch keeps the rounded values, too.
CASES["cast_before_weight"] = replace(CASE, kept={"torch": 1}, gpu=[*GPU, *GPU_PARTS])
