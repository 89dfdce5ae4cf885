"""Calls of gated_mlp."""

import torch
from torch.nn import functional

from tests.kernels.contract import DEVICE, DTYPES, Case, in_order

#: Small limits, so that a clamp in another place shows.
NUMBERS = {
    "clamped": {"limit": 0.75},
    "clamped_after": {"limit": 0.5},
    "scaled_sigmoid": {"alpha": 1.702, "limit": 1.5},
}


def operands(variant, shape, dtype, others):
    gate, up = (torch.randn(shape).mul(2).to(dtype) for _ in "gu")
    return in_order(
        "gated_mlp",
        variant,
        {"gate": gate, "up": up, "activation": functional.silu, **NUMBERS.get(variant, {})},
    )


def asked(rule, gate, up, activation, *rest):
    return rule(gate, activation)


def case(variant):
    return Case(
        lambda *of: operands(variant, *of),
        [(2, 3, 7), (1,), (0, 4), (5, 0), (65, 130), (3, 5000)],
        batch=(64, 256),
        gpu=[(64, 12288)],
        deep=(2, 3, 4, 6),
        rows=("gate", "up"),
        exact=("torch",),
        unlike={("rounds", "npu"): "torch_npu's operator rounds once"}
        if variant in {"product", "clamped"}
        else {},
        rule=(lambda rule, gate, *rest: rule(gate)) if variant == "scaled_sigmoid" else asked,
        # Both side by side, as the operator takes them; and what is below the limit.
        kept={"npu": 2, "torch": 2 if variant == "clamped" else 0},
        # The interpreter cuts float32 off where bfloat16 is rounded, which moves an activation past its limit.
        dtypes=DTYPES[:2] if variant == "clamped_after" and DEVICE == "cpu" else DTYPES,
    )
