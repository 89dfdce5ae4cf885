"""Calls of gated_mlp's Triton kernels that `tests.kernels.absent_gpu` compiles."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from torch.nn import functional

from tests.kernels.absent_gpu.operands import Call, both_ways, empty, kernels_of


def calls() -> Iterator[Call]:
    """Every gate."""
    rest = {"clamped": [7.0], "clamped_after": [7.0]}
    for variant, kernel in kernels_of("gated_mlp").items():
        given = [1.702, 7.0] if variant == "scaled_sigmoid" else [functional.silu, *rest.get(variant, [])]

        def call(gate, up, kernel=kernel, given=given):
            return kernel(gate, up, *given)

        yield variant, partial(both_ways, call, [empty(64, 12288), empty(64, 12288)])
