"""Calls of moe_experts' Triton kernels that `tests.kernels.absent_gpu` compiles, in parts: there is most to choose."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import partial

import torch

from tests.kernels.absent_gpu.operands import Call, both_ways, empty, kernels_of


def experts(
    sizes: Sequence[tuple[int, int]], blocks: Sequence[int], names: Sequence[str], **casts: bool
) -> Iterator[Call]:
    """Variants by name, of these sizes, with as many rows an expert; rows side by side and 8 numbers apart."""
    from tests.kernels.moe_experts.formulas import CASES
    from veomni_hook.kernels.moe_experts import triton

    fused = {name: triton.in_float8(name, **casts) for name in names} if casts else kernels_of("moe_experts")
    for name in names:
        for hidden, inner in sizes:
            for block in blocks:
                for apart in (0, 8):
                    known = {12: hidden, 10: inner, 20: 2 * inner}  # by the sizes of the formulas
                    shapes = [[known[n] for n in shape] for shape in CASES[name].shapes.values()]
                    x = empty(2 * block, hidden + apart)[:, :hidden]
                    index, weights = empty(2 * block, 2, dtype=torch.int64), empty(2 * block, 2)

                    def call(x, index, weights, *given, name=name):
                        return fused[name](x, index, weights, *given, *CASES[name].rest)

                    yield (
                        f"{name} {hidden} {inner}, {block} rows, {apart} apart",
                        partial(both_ways, call, [x, index, weights, *(empty(4, *each) for each in shapes)]),
                    )


def adapted_experts(
    sizes: Sequence[tuple[int, int]], blocks: Sequence[int], ranks: Sequence[int], names: Sequence[str]
) -> Iterator[Call]:
    """Variants by name whose weights have low-rank adapters, of these sizes and ranks."""
    from tests.kernels.moe_experts.formulas import CASES
    from veomni_hook.kernels.moe_experts.low_rank import AdaptedWeight, Part

    fused = kernels_of("moe_experts")
    for name in names:
        for hidden, inner in sizes:
            for block, rank in itertools.product(blocks, ranks):
                known = {12: hidden, 10: inner, 20: 2 * inner}  # by the sizes of the formulas
                shapes = [[known[n] for n in shape] for shape in CASES[name].shapes.values()]
                weights = [empty(4, *each) for each in shapes]
                factors = [
                    (empty(4, each[0], rank), empty(4, rank, each[1])) for each in shapes if len(each) == 2
                ]

                count = len(weights)

                def call(x, index, routing, *given, name=name, count=count):
                    pairs = iter(zip(given[count::2], given[count + 1 :: 2], strict=True))
                    stacked = [
                        AdaptedWeight(each, (Part(*next(pairs), 0.5),), lambda: None)
                        if each.ndim == 3
                        else each
                        for each in given[:count]
                    ]
                    return fused[name](x, index, routing, *stacked, *CASES[name].rest)

                x, index = empty(2 * block, hidden), empty(2 * block, 2, dtype=torch.int64)
                operands = [x, index, empty(2 * block, 2), *weights, *itertools.chain(*factors)]
                yield (
                    f"{name} {hidden} {inner}, {block} rows, rank {rank}",
                    partial(both_ways, call, operands),
                )


_LAYOUTS = (
    "gated", "gated_transposed", "biased_interleaved_alpha_gated", "biased_alpha_gated_float32", "ungated",
)  # fmt: skip

CALLS = {
    "moe_experts in float8": partial(
        experts, [(2048, 768), (144, 208)], [128], ["gated", "biased_interleaved_alpha_gated"], mx=False
    ),
    "moe_experts in mxfp8": partial(
        experts, [(2048, 768), (160, 224)], [128], ["gated", "biased_interleaved_alpha_gated"], mx=True
    ),
    "moe_experts of odd widths": partial(experts, [(136, 200)], [16, 128], ["gated"]),
    # As wide as those whose rows are copied into order.
    "moe_experts of great width": partial(experts, [(256, 4096), (136, 4100)], [128], _LAYOUTS),
    "moe_experts with adapters": partial(
        adapted_experts, [(2048, 768), (136, 200)], [16, 128], [16, 256], ["gated", "gated_transposed"]
    ),
    "moe_experts": partial(experts, [(2048, 768), (136, 200), (21, 19)], [16, 32, 64, 128], _LAYOUTS),
}
