"""Calls of attention's Triton kernels that `tests.kernels.absent_gpu` compiles."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace

from tests.kernels import declared
from tests.kernels.absent_gpu.operands import BF16, F32, Call, both_ways, empty
from veomni_hook.kernels.selection.registry import load_attribute


def calls() -> Iterator[Call]:
    """DeepSeek-V4's shapes, in which keys are the values; GPT-OSS's; odd widths; float32."""
    load = declared.kernels("attention", "tiles")["sinks"].load
    kernel = load_attribute(load)
    shapes = (
        (64, 1, 512, None, BF16),
        (128, 1, 512, None, BF16),
        (64, 8, 64, 64, BF16),
        (6, 2, 100, 200, BF16),
    )
    for heads, kv, width, value_width, dtype in (*shapes, (64, 1, 512, None, F32), (64, 8, 64, 64, F32)):
        leaves = [
            empty(2, heads, 64, width, dtype=dtype),
            empty(2, kv, 192, width, dtype=dtype),
            empty(heads),
        ]
        if value_width is not None:
            leaves.append(empty(2, kv, 192, value_width, dtype=dtype))

        def call(query, key, sinks, *value, dtype=dtype):
            module = SimpleNamespace(sinks=sinks)
            return kernel(query, key, *(value or (key,)), empty(2, 1, 64, 192, dtype=dtype), module, 0.1)

        yield f"{heads} {kv} {width} {value_width} {dtype}", partial(both_ways, call, leaves)
