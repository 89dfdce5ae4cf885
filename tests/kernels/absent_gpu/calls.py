"""Calls of every op's Triton kernels, forward and backward, with operands whose numbers do not matter."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import functional

from tests.kernels import declared
from tests.kernels.nn_layer_norm.norms import FORMS, of_tensors
from veomni_hook.kernels.selection.registry import load_attribute
from veomni_hook.kernels.slot.arguments import operand_names

__all__ = ["OPS", "Call"]

Tensor = torch.Tensor
#: What is called, and how it is named.
Call = tuple[str, Callable[[], Any]]

BF16, F32 = torch.bfloat16, torch.float32


def empty(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """Zeros: every value is a valid one, also of an index."""
    return torch.zeros(shape, dtype=dtype)


def both_ways(function: Callable[..., Any], leaves: Sequence[Tensor]) -> None:
    """Call ``function`` and go back through what it returns."""
    given = [leaf.detach().requires_grad_(leaf.is_floating_point()) for leaf in leaves]
    results = function(*given)
    results = [each for each in (results if isinstance(results, tuple) else (results,)) if each is not None]
    wanted = [each for each in results if each.requires_grad]
    torch.autograd.backward(wanted, [torch.zeros_like(each) for each in wanted])


def kernels_of(op: str) -> dict[str, Callable[..., Any]]:
    """The op's Triton kernels, by variant."""
    return {variant: load_attribute(k.load) for variant, k in declared.kernels(op, "triton").items()}


def rms_norm() -> Iterator[Call]:
    """Rows in one block, in two, in parts, and of odd lengths."""
    for variant, kernel in kernels_of("rms_norm").items():
        for columns in (128, 4096, 12288, 130, *_in_parts(variant)):
            rows = [empty(64, columns)] * (2 if "gate" in variant else 1)
            weights = [] if "unweighted" in variant or variant == "inverse_rms" else [empty(columns)]
            rest: dict[str, Any] = {"eps": 1e-6}
            if variant.endswith("_gated"):
                rest["activation"] = functional.silu
            if variant.endswith("_grouped"):
                rest["group_size"] = columns // 2
            yield f"{variant} {columns}", partial(both_ways, partial(kernel, **rest), [*rows, *weights])


def _in_parts(variant: str) -> tuple[int, ...]:
    return (20480, 32768) if variant == "cast_before_weight" else ()


def layer_norm() -> Iterator[Call]:
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


def add_rms_norm() -> Iterator[Call]:
    """The same of sums."""
    for variant, kernel in kernels_of("add_rms_norm").items():
        for columns in (128, 4096, 12288, 130, *_in_parts(variant)):
            leaves = [empty(64, columns), empty(64, columns), empty(columns)]
            yield f"{variant} {columns}", partial(both_ways, partial(kernel, eps=1e-6), leaves)


def nn_layer_norm() -> Iterator[Call]:
    """Norms of torch's class with all parameters, with a weight, and with none."""
    yield from _of_modules("nn_layer_norm", 1)


def add_layer_norm() -> Iterator[Call]:
    """The same of sums."""
    yield from _of_modules("add_layer_norm", 2)


def _of_modules(op: str, count: int) -> Iterator[Call]:
    for variant, kernel in kernels_of(op).items():
        for columns in (128, 1152, 4096, 12288):
            for form, call in ((form, of_tensors(kernel, form, columns)) for form in FORMS):
                parameters = [empty(columns)] * sum(FORMS[form])
                leaves = [empty(64, columns)] * count + parameters
                yield f"{variant} {columns} {form}", partial(both_ways, call, leaves)


def row_merge() -> Iterator[Call]:
    """Every variant at the width of most models, at an odd one, and in several parts."""
    mask = torch.tensor([True, False]).repeat(32)
    for variant, kernel in kernels_of("row_merge").items():
        for columns in (128, 4096, 130, 5120):
            rest = (torch.Tensor.masked_scatter,) if variant == "rows" else ()
            at = mask.unsqueeze(1) if variant == "rows" else mask

            def call(x, source, kernel=kernel, at=at, rest=rest):
                return kernel(x, at, source, *rest)

            leaves = [empty(64, columns), empty(32, columns)]
            yield f"{variant} {columns}", partial(both_ways, call, leaves)


def hyper_connection() -> Iterator[Call]:
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


def gated_delta_rule() -> Iterator[Call]:
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


def decay_of_channels(
    kernel: Callable[..., Any], dtype: torch.dtype | None, bound: tuple[bool, float | None], *leaves: Tensor
) -> Any:
    """A decay of channels, whose last operands are no tensors."""
    return kernel(*leaves, dtype, *bound)


def log_decay() -> Iterator[Call]:
    """Heads of usual and odd numbers; with a decay a channel, with and without a bound."""
    for variant, kernel in kernels_of("log_decay").items():
        if variant.startswith("channels"):
            for (heads, width), bound in itertools.product(
                [(32, 128), (3, 5)], [(False, None), (True, -5.0)]
            ):
                leaves = [empty(2, 70, heads, width), empty(1, 1, heads, 1), empty(heads * width)]
                dtype = BF16 if variant == "channels_rounded_rate" else None
                call = partial(decay_of_channels, kernel, dtype, bound)
                yield f"{variant} {heads} {width} {bound[1]}", partial(both_ways, call, leaves)
            continue
        for heads in (16, 32, 64, 6, 130):
            leaves = [empty(2, 70, heads), empty(heads), empty(heads)]
            leaves += [empty(2, 70, heads)] * (variant == "softplus_and_sigmoid")
            yield f"{variant} {heads}", partial(both_ways, kernel, leaves)


def index_scores() -> Iterator[Call]:
    """Heads of the usual width, of an odd one and of the widest, in two dtypes, and few queries."""
    for variant, kernel in kernels_of("index_scores").items():
        for queries, heads, width in ((300, 64, 128), (1, 64, 128), (70, 6, 100), (70, 4, 256)):
            for dtype in (BF16, F32):
                shapes = (2, queries, heads, width), (2, 333, width)
                leaves = [*(empty(*shape, dtype=dtype) for shape in shapes)]
                leaves.append(empty(2, queries, heads, dtype=F32))
                yield (
                    f"{variant} {queries} {heads} {width} {dtype}",
                    partial(both_ways, partial(kernel, scale=0.1), leaves),
                )


def attention() -> Iterator[Call]:
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


def causal_conv() -> Iterator[Call]:
    """Samples and rows, with and without what can be left out, at a usual and an odd number of channels."""
    (kernel,) = kernels_of("causal_conv").values()
    for channels, ends in ((8192, None), (1000, None), (8192, torch.tensor([0, 30, 64], dtype=torch.int32))):
        for biased, activation in ((False, None), (True, "silu")):

            def call(x, weight, *bias, activation=activation, ends=ends):
                return kernel(x.transpose(1, 2), weight, *(bias or (None,)), activation, ends)

            leaves = [empty(1, 64, channels), empty(channels, 4)] + [empty(channels)] * biased
            yield f"{channels} {activation} {ends is not None}", partial(both_ways, call, leaves)


def rotary() -> Iterator[Call]:
    """Every variant at the width of most models, and at an odd one."""
    from tests.kernels.rotary import variants

    for variant in kernels_of("rotary"):
        for width in (128, 80):
            ours, _, states = variants.call("triton", variant, BF16, BF16, heads=(8, 2), width=width)
            yield f"{variant} {width}", partial(both_ways, ours, states)


def qk_norm_rotary() -> Iterator[Call]:
    """Every variant at the width of most models, and at an odd one."""
    for variant, kernel in kernels_of("qk_norm_rotary").items():
        for width in (128, 80):
            turned = width // 2 if variant.endswith("_partial") else width
            q, k = (empty(2, 9, heads, width).transpose(1, 2) for heads in (32, 8))
            cos, sin = empty(1, 9, turned), empty(1, 9, turned)

            def call(q, k, first, second, kernel=kernel, cos=cos, sin=sin):
                return kernel(q, k, first, second, 1e-6, 1e-6, cos, sin)

            yield f"{variant} {width}", partial(both_ways, call, [q, k, empty(width), empty(width)])


def gated_mlp() -> Iterator[Call]:
    """Every gate."""
    rest = {"clamped": [7.0], "clamped_after": [7.0]}
    for variant, kernel in kernels_of("gated_mlp").items():
        given = [1.702, 7.0] if variant == "scaled_sigmoid" else [functional.silu, *rest.get(variant, [])]

        def call(gate, up, kernel=kernel, given=given):
            return kernel(gate, up, *given)

        yield variant, partial(both_ways, call, [empty(64, 12288), empty(64, 12288)])


def linear_cross_entropy() -> Iterator[Call]:
    """Everything that is asked of the loss and of statistics without it, in 16 bits and in float32."""
    from tests.kernels.linear_cross_entropy.objectives import (
        EVERYTHING,
        OBJECTIVES,
        loss_of,
        operands,
        tokens_of,
    )
    from veomni_hook.kernels.linear_cross_entropy import triton

    for name in ("plain", "all", "scale, softcap"):
        for dtype in (BF16, F32):
            given, target = operands(dtype)
            objective = OBJECTIVES[name]("cpu")
            yield f"{name} {dtype}", partial(both_ways, loss_of(triton, target, objective, EVERYTHING), given)
            tokens = tokens_of(triton, target, objective, EVERYTHING)
            yield f"statistics, {name} {dtype}", partial(both_ways, tokens, given)


def load_balancing_loss() -> Iterator[Call]:
    """Few experts and as many as it takes."""
    for variant, kernel in kernels_of("load_balancing_loss").items():
        for experts in (8, 128, 1024):
            mask = torch.ones(2, 16, dtype=torch.int64)

            def call(*layers, kernel=kernel, experts=experts, mask=mask):
                return kernel(layers, experts, 2, mask)

            yield f"{variant} {experts}", partial(both_ways, call, [empty(32, experts), empty(32, experts)])


def moe_router() -> Iterator[Call]:
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


def experts(sizes: Sequence[tuple[int, int]], blocks: Sequence[int], names: Sequence[str]) -> Iterator[Call]:
    """Variants by name, of these sizes, with as many rows an expert; rows side by side and 8 numbers apart."""
    from tests.kernels.moe_experts.formulas import CASES

    fused = kernels_of("moe_experts")
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
    "gated",
    "gated_transposed",
    "biased_interleaved_alpha_gated",
    "biased_alpha_gated_float32",
    "ungated",
)

#: By name: an op, or for experts, which have most to choose, a part of one.
OPS: dict[str, Callable[[], Iterator[Call]]] = {
    "rms_norm": rms_norm,
    "add_rms_norm": add_rms_norm,
    "layer_norm": layer_norm,
    "nn_layer_norm": nn_layer_norm,
    "add_layer_norm": add_layer_norm,
    "row_merge": row_merge,
    "hyper_connection": hyper_connection,
    "gated_delta_rule": gated_delta_rule,
    "causal_conv": causal_conv,
    "log_decay": log_decay,
    "index_scores": index_scores,
    "attention": attention,
    "rotary": rotary,
    "qk_norm_rotary": qk_norm_rotary,
    "gated_mlp": gated_mlp,
    "linear_cross_entropy": linear_cross_entropy,
    "load_balancing_loss": load_balancing_loss,
    "moe_router": moe_router,
    "moe_experts of odd widths": partial(experts, [(136, 200)], [16, 128], ["gated"]),
    # As wide as those whose rows are copied into order.
    "moe_experts of great width": partial(experts, [(256, 4096), (136, 4100)], [128], _LAYOUTS),
    "moe_experts with adapters": partial(
        adapted_experts, [(2048, 768), (136, 200)], [16, 128], [16, 256], ["gated", "gated_transposed"]
    ),
    "moe_experts": partial(experts, [(2048, 768), (136, 200), (21, 19)], [16, 32, 64, 128], _LAYOUTS),
}
