"""Calls of nn_layer_norm's Triton kernels that `tests.kernels.absent_gpu` compiles."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from tests.kernels.absent_gpu.operands import Call, both_ways, empty, kernels_of
from tests.kernels.nn_layer_norm.norms import FORMS, of_tensors


def calls() -> Iterator[Call]:
    """Norms of torch's class with all parameters, with a weight, and with none."""
    yield from of_modules("nn_layer_norm", 1)


def of_modules(op: str, count: int) -> Iterator[Call]:
    for variant, kernel in kernels_of(op).items():
        for columns in (128, 1152, 4096, 12288):
            for form, call in ((form, of_tensors(kernel, form, columns)) for form in FORMS):
                parameters = [empty(columns)] * sum(FORMS[form])
                leaves = [empty(64, columns)] * count + parameters
                yield f"{variant} {columns} {form}", partial(both_ways, call, leaves)
