"""Calls of layer_norm's Triton kernels that `tests.kernels.absent_gpu` compiles."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from tests.kernels.absent_gpu.operands import Call, Tensor, both_ways, empty, kernels_of
from veomni_hook.kernels.slot.arguments import operand_names


def calls() -> Iterator[Call]:
    """Rows, and groups of neighbours with a weight each."""
    for variant, kernel in kernels_of("layer_norm").items():
        for columns in (128, 4096, 12288, 130):
            operands = operand_names("layer_norm", variant)
            shape = {"normalized_shape": (columns,)} if "normalized_shape" in operands else {}
            call = partial(kernel, eps=1e-6, **shape)
            parameters = [name for name in ("weight", "bias") if name in operands]
            kinds = [empty(4 if columns < 4096 else 1, columns), empty(columns)]
            for parameter in kinds if "weight" in parameters and not shape else kinds[1:]:
                named = dict.fromkeys(parameters, parameter)

                def of(x: Tensor, *given: Tensor, call: Any = call, names: Any = tuple(named)) -> Any:
                    return call(x, **dict(zip(names, given, strict=True)))

                rows = empty(64, *parameter.shape)
                yield f"{variant} {tuple(parameter.shape)}", partial(both_ways, of, [rows, *named.values()])
