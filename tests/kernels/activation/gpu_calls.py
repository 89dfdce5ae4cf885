"""Calls of activation's Triton kernels that `tests.kernels.absent_gpu` compiles."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from tests.kernels.absent_gpu.operands import Call, both_ways, empty, kernels_of

__all__ = ["CALLS"]


def calls() -> Iterator[Call]:
    """Every activation."""
    for variant, kernel in kernels_of("activation").items():
        yield variant, partial(both_ways, kernel, [empty(64, 12288)])


CALLS = {"activation": calls}
