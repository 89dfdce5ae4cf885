"""Calls of gated_delta_rule's Triton kernels that `tests.kernels.absent_gpu` compiles."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from tests.kernels.absent_gpu.operands import F32, Call, both_ways, empty, kernels_of


def calls() -> Iterator[Call]:
    """Heads of usual widths, of small, odd and large ones."""
    from veomni_hook.kernels.gated_delta_rule import triton as scalar

    for variant, kernel in kernels_of("gated_delta_rule").items():
        channels = variant == "channel_decay"
        for keys, values in ((128, 128), (64, 128), (16, 24), (32, 32), (96, 80), (128, 256), (256, 256)):
            if keys > 128 and not channels and scalar._loads_late(torch.device("cpu")):
                continue  # `refuses` says so
            for start in (False, True):

                def call(q, k, v, g, beta, *state, start=start, kernel=kernel):
                    return kernel(q, k, v, g, beta, *(state or (None,)), start, not start)

                sizes = [(1, 70, 4 if channels else 2, keys)] * 2 + [(1, 70, 4, values), (1, 70, 4)]
                leaves = [empty(*size) for size in sizes]
                leaves.insert(3, empty(1, 70, 4, *[keys] * channels, dtype=F32))
                leaves += [empty(1, 4, keys, values)] * start
                yield f"{variant} {keys} {values} {start}", partial(both_ways, call, leaves)
