"""Calls of add_layer_norm's Triton kernels that `tests.kernels.absent_gpu` compiles."""

from __future__ import annotations

from collections.abc import Iterator

from tests.kernels.absent_gpu.operands import Call
from tests.kernels.nn_layer_norm.gpu_calls import of_modules


def calls() -> Iterator[Call]:
    """The same of sums."""
    yield from of_modules("add_layer_norm", 2)
