"""Norms of queries and keys with their rotation on a CUDA device: `python -m benchmarks.qk_norm_rotary_gpu`.

Beside each other: upstream's chain, the same under torch.compile, Liger's RMSNorm and rotary embedding, our
kernels for the two, and the one for both. Gradients arrive as attention gives them, ``[batch, heads, length,
head_dim]`` in memory order, and in the order that results have; backwards are timed alone, from a graph that
is kept. Shares count the least that memory has to move: queries and keys in and out, gradients in and out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module

import torch
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from benchmarks._peers import Row, bandwidth, by_turns, host_time, record
from benchmarks._steps import EPS, upstream_rms_norm
from veomni_hook.kernels.qk_norm_rotary.triton import cast_before_weight_half_split
from veomni_hook.kernels.rms_norm.triton import cast_before_weight

# Batch, length, heads of queries and keys, head_dim.
SHAPES = ((16, 8192, 32, 8, 128), (8, 8192, 64, 8, 128), (16, 8192, 16, 8, 64), (4, 4096, 32, 8, 128))
Tensor = torch.Tensor
Pair = tuple[Tensor, Tensor]
Side = Callable[..., Pair]


def upstream(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor) -> Pair:
    """The chain as modeling code has it."""
    return apply_rotary_pos_emb(upstream_rms_norm(q, q_weight), upstream_rms_norm(k, k_weight), cos, sin)


def fused(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor) -> Pair:
    """One kernel."""
    return cast_before_weight_half_split(q, k, q_weight, k_weight, EPS, EPS, cos, sin)


def sides() -> dict[str, Side]:
    """The implementations that this machine has."""
    found: dict[str, Side] = {"eager": upstream, "compile": torch.compile(upstream, dynamic=False)}
    try:
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction
        from liger_kernel.ops.rope import LigerRopeFunction
    except ImportError:
        print("liger_kernel is not installed")
    else:

        def liger(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor) -> Pair:
            # As in a patched model: the norm of what lies in memory, and then the heads to the front.
            normed = (
                LigerRMSNormFunction.apply(x.transpose(1, 2), weight, EPS, 0.0, "llama", False).transpose(
                    1, 2
                )
                for x, weight in ((q, q_weight), (k, k_weight))
            )
            return LigerRopeFunction.apply(*normed, cos, sin)

        found["liger"] = liger
    try:
        half_split = import_module("veomni_hook.kernels.rotary.triton").half_split
    except (ImportError, AttributeError):
        print("there is no rotary kernel in Triton")
    else:

        def apart(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor) -> Pair:
            q, k = cast_before_weight(q, q_weight, EPS), cast_before_weight(k, k_weight, EPS)
            return half_split(q, k, cos, sin, 1)

        found["ours apart"] = apart
    return found | {"ours": fused}


def operands(shape: tuple[int, ...]) -> list[Tensor]:
    """q and k as projections give them, weights, cos and sin."""
    batch, length, q_heads, k_heads, columns = shape
    q, k = (
        torch.randn(batch, length, heads, columns, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        for heads in (q_heads, k_heads)
    )
    weights = [torch.rand(columns, device="cuda").bfloat16() for _ in "qk"]
    angles = torch.rand(1, length, columns // 2, device="cuda").repeat(1, 1, 2)
    return [q, k, *weights, angles.cos().bfloat16(), angles.sin().bfloat16()]


def main() -> None:
    """Measure every shape and record the results."""
    torch.manual_seed(0)
    copied = bandwidth()
    rows = [row for shape in SHAPES for row in measured(shape, copied)]
    record("qk_norm_rotary_gpu", rows, copy_bytes_per_second=copied, host_milliseconds=host())


def host() -> dict[str, float]:
    """Host time of a forward and backward of small tensors in eager mode."""
    q, k, *weights, cos, sin = operands((1, 64, 32, 8, 128))

    def step(side: Side) -> None:
        leaves = [x.detach().requires_grad_() for x in (q, k, *weights)]
        found = side(*leaves, cos, sin)
        torch.autograd.grad(found, leaves, [q, k])

    found = {name: host_time(partial(step, side)) for name, side in sides().items()}
    print(f"host time of a forward and backward, ms: {found}")
    return found


def measured(shape: tuple[int, ...], copied: float) -> Iterator[Row]:
    """Forward, and backward from gradients of either layout, at one size."""
    torch._dynamo.reset()
    q, k, *weights, cos, sin = operands(shape)
    moved = q.nbytes + k.nbytes
    size = " x ".join(map(str, shape))
    layouts = {
        "backward, as results": [torch.randn_like(x) for x in (q, k)],
        "backward, heads first": [torch.randn(x.shape, device="cuda", dtype=x.dtype) for x in (q, k)],
    }

    def forward(side: Side) -> None:
        with torch.no_grad():
            side(q, k, *weights, cos, sin)

    calls = {name: partial(forward, side) for name, side in sides().items()}
    yield row("forward", size, 2 * moved, by_turns(calls), copied)
    for layout, grads in layouts.items():
        times: dict[str, float] = {}
        # One graph at a time: what five of them keep does not fit beside each other.
        for name, side in sides().items():
            leaves = [x.detach().requires_grad_() for x in (q, k, *weights)]
            found = side(*leaves, cos, sin)
            # Liger writes into what it is given, so it gets gradients of its own.
            incoming = [x.clone() for x in grads] if name == "liger" else grads
            backward = partial(torch.autograd.grad, found, leaves, incoming, retain_graph=True)
            times |= by_turns({name: backward})
            del leaves, found, incoming, backward
        yield row(layout, size, 3 * moved, times, copied)


def row(part: str, size: str, moving: int, times: dict[str, float], copied: float) -> Row:
    """One part with its shares of the bandwidth."""
    shares = {name: moving / taken * 1e3 / copied for name, taken in times.items()}
    return Row("qk_norm", part, "bfloat16", size, moving, times, shares)


if __name__ == "__main__":
    main()
