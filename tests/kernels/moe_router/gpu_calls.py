"""Calls of moe_router's Triton kernels that `tests.kernels.absent_gpu` compiles."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from tests.kernels.absent_gpu.operands import F32, Call, Tensor, both_ways, empty, kernels_of


def calls() -> Iterator[Call]:
    """Few experts and many."""
    fused = kernels_of("moe_router")
    for experts in (8, 256, 512):
        logits, bias = empty(64, experts), empty(experts, dtype=F32)
        calls: dict[str, Callable[[Tensor], Any]] = {
            "softmax_topk": lambda x: fused["softmax_topk"](x, 4, True),
            "topk_softmax": lambda x: fused["topk_softmax"](x, 4),
            "biased_topk": lambda x, b=bias: fused["biased_topk"](x, b, 4, torch.sigmoid, 1e-20, True),
            "grouped_topk": lambda x, b=bias: fused["grouped_topk"](
                x, b, 4, b.numel(), 4, 2, True, -math.inf, True
            ),
        }
        for variant, call in calls.items():
            yield f"{variant} {experts}", partial(both_ways, call, [logits])
        chosen = empty(64, 4, dtype=torch.int64)
        yield (
            f"given {experts}",
            partial(both_ways, lambda x, i=chosen: fused["softmax_topk"](x, 4, True, indices=i), [logits]),
        )
        yield (
            f"given with a bias {experts}",
            partial(
                both_ways,
                lambda x, b=bias, i=chosen: fused["biased_topk"](
                    x, b, 4, torch.sigmoid, 1e-20, True, indices=i
                ),
                [logits],
            ),
        )
