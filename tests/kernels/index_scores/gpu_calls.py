"""Calls of index_scores's Triton kernels that `tests.kernels.absent_gpu` compiles."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from tests.kernels.absent_gpu.operands import BF16, F32, Call, both_ways, empty, kernels_of


def calls() -> Iterator[Call]:
    """Heads of the usual width, of an odd one and of the widest, in two dtypes, and few queries."""
    for variant, kernel in kernels_of("index_scores").items():
        for queries, heads, width in ((300, 64, 128), (1, 64, 128), (70, 6, 100), (70, 4, 256)):
            for dtype in (BF16, F32):
                shapes = (2, queries, heads, width), (2, 333, width)
                leaves = [*(empty(*shape, dtype=dtype) for shape in shapes)]
                leaves.append(empty(2, queries, heads, dtype=F32))
                yield (
                    f"{variant} {queries} {heads} {width} {dtype}",
                    partial(both_ways, partial(kernel, scale=0.1), leaves),
                )
