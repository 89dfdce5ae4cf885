"""Calls of add_rms_norm's Triton kernels that `tests.kernels.absent_gpu` compiles."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from tests.kernels.absent_gpu.operands import Call, both_ways, empty, kernels_of
from tests.kernels.rms_norm.gpu_calls import in_parts


def calls() -> Iterator[Call]:
    """The same of sums."""
    for variant, kernel in kernels_of("add_rms_norm").items():
        for columns in (128, 4096, 12288, 130, *in_parts(variant)):
            leaves = [empty(64, columns), empty(64, columns), empty(columns)]
            yield f"{variant} {columns}", partial(both_ways, partial(kernel, eps=1e-6), leaves)
