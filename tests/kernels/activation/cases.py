"""Calls of activation."""

from __future__ import annotations

import torch

from tests.kernels.contract import DEVICE, Case, in_order
from veomni_hook.kernels.selection.registry import registry

__all__ = ["CASES"]

#: The interpreter cuts bfloat16 off where a GPU rounds, after each of a dozen steps.
CUT_OFF = {} if DEVICE == "cuda" else {("triton", torch.bfloat16): 5e-2}


def operands(variant, shape, dtype, others):
    return in_order("activation", variant, {"x": torch.randn(shape).mul(2).to(dtype)})


CASES = {
    variant: Case(
        lambda *of, variant=variant: operands(variant, *of),
        [(2, 3, 7), (1,), (0, 4), (5, 0), (65, 130), (3, 5000)],
        batch=(64, 256),
        gpu=[(64, 12288)],
        deep=(2, 3, 4, 6),
        rows=("x",),
        exact=("torch",),
        tolerance=CUT_OFF if variant.startswith("gelu_tanh") else {},
    )
    for variant in registry.ops()["activation"].variants
}
