"""Calls of hyper_connection's Triton kernels that `tests.kernels.absent_gpu` compiles."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace

from tests.kernels.absent_gpu.operands import F32, Call, both_ways, empty, kernels_of


def calls() -> Iterator[Call]:
    """Each variant at the width of a large model, and at an odd one, with other numbers of streams."""
    fused, norm = kernels_of("hyper_connection"), SimpleNamespace(eps=1e-6)
    for n, columns in ((4, 4096), (2, 130), (8, 96)):
        streams = empty(1, 64, n, columns)

        def sinkhorn(x, fn, base, scale, n=n):
            return fused["sinkhorn"](x, norm, None, fn, base, scale, n, 20, 1e-6)

        def collapse(x, fn, base, scale):
            return fused["collapse"](x, norm, None, fn, base, scale, 1e-6)

        def mix(post, comb, output, x):
            return fused["mix"](post, comb, output, x, x.dtype)

        for call, m, scales in ((sinkhorn, (2 + n) * n, 3), (collapse, n, 1)):
            parameters = (empty(*shape, dtype=F32) for shape in ((m, n * columns), (m,), (scales,)))
            yield f"{call.__name__} {n} {columns}", partial(both_ways, call, [streams, *parameters])
        weights = (empty(1, 64, *shape, dtype=F32) for shape in ((n,), (n, n)))
        yield f"mix {n} {columns}", partial(both_ways, mix, [*weights, empty(1, 64, columns), streams])
