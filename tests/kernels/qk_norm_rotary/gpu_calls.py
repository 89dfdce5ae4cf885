"""Calls of qk_norm_rotary's Triton kernels that `tests.kernels.absent_gpu` compiles."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from tests.kernels.absent_gpu.operands import Call, both_ways, empty, kernels_of


def calls() -> Iterator[Call]:
    """Every variant at the width of most models, and at an odd one."""
    for variant, kernel in kernels_of("qk_norm_rotary").items():
        for width in (128, 80):
            turned = width // 2 if variant.endswith("_partial") else width
            q, k = (empty(2, 9, heads, width).transpose(1, 2) for heads in (32, 8))
            cos, sin = empty(1, 9, turned), empty(1, 9, turned)

            def call(q, k, first, second, kernel=kernel, cos=cos, sin=sin):
                return kernel(q, k, first, second, 1e-6, 1e-6, cos, sin)

            yield f"{variant} {width}", partial(both_ways, call, [q, k, empty(width), empty(width)])
