"""Calls of the Triton casts to float8 that `tests.kernels.absent_gpu` compiles."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from tests.kernels.absent_gpu.operands import BF16, F32, Call, empty
from veomni_hook.kernels.float8 import triton as kernels
from veomni_hook.kernels.float8.reference import FLOAT8


def calls() -> Iterator[Call]:
    """Rows that a program holds, narrow and wide ones, and one in parts; blocks of columns."""
    for dtype in (BF16, F32):
        for columns in (64, 4096, 12288, 28672):
            yield f"rows {columns} {dtype}", partial(kernels.quantised, empty(48, columns, dtype=dtype))
        for shape in ((4096, 4096), (48, 80)):
            yield f"columns {shape} {dtype}", partial(kernels.quantised_columns, empty(*shape, dtype=dtype))
            factors = empty(shape[0], 1, dtype=F32)
            multiplied = partial(kernels.quantised_columns, empty(*shape, dtype=dtype), factors)
            yield f"columns {shape} {dtype}, multiplied", multiplied
            for turned in (False, True):
                cast = partial(kernels.in_mx, empty(*shape, dtype=dtype), turned=turned)
                yield f"MX {shape} {dtype}, {turned=}", cast
    for shape in ((4096, 4096), (48, 80)):
        yield f"turned {shape}", partial(kernels.turned, empty(*shape, dtype=FLOAT8))
