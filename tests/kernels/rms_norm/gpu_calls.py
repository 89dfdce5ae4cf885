"""Calls of rms_norm's Triton kernels that `tests.kernels.absent_gpu` compiles."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch.nn import functional

from tests.kernels.absent_gpu.operands import Call, both_ways, empty, kernels_of


def calls() -> Iterator[Call]:
    """Rows in one block, in two, in parts, and of odd lengths."""
    for variant, kernel in kernels_of("rms_norm").items():
        for columns in (128, 4096, 12288, 130, *in_parts(variant)):
            rows = [empty(64, columns)] * (2 if "gate" in variant else 1)
            weights = [] if "unweighted" in variant or variant == "inverse_rms" else [empty(columns)]
            rest: dict[str, Any] = {"eps": 1e-6}
            if variant.endswith("_gated"):
                rest["activation"] = functional.silu
            if variant.endswith("_grouped"):
                rest["group_size"] = columns // 2
            yield f"{variant} {columns}", partial(both_ways, partial(kernel, **rest), [*rows, *weights])


def in_parts(variant: str) -> tuple[int, ...]:
    return (20480, 32768) if variant == "cast_before_weight" else ()
