"""Calls of rotary's Triton kernels that `tests.kernels.absent_gpu` compiles."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from tests.kernels.absent_gpu.operands import BF16, Call, both_ways, kernels_of


def calls() -> Iterator[Call]:
    """Every variant at the width of most models, and at an odd one."""
    from tests.kernels.rotary import variants

    for variant in kernels_of("rotary"):
        for width in (128, 80):
            ours, _, states = variants.call("triton", variant, BF16, BF16, heads=(8, 2), width=width)
            yield f"{variant} {width}", partial(both_ways, ours, states)
