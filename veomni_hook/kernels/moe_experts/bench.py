"""The experts of one layer: three products of matrices for every pair of a token and one of its experts.

Where SonicMoE is installed, also its block, a router and experts, beside the same work in our kernels: its
router's weights stay in float32, and its kernels compile for a minute or two at each new shape.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from veomni_hook import accelerator
from veomni_hook.kernels.problem import Package, Problem, Side, beside, formula, made, peer

__all__ = ["blocks", "problems", "sonic", "upstream"]

# Tokens, hidden size, inner size, experts, experts of a token, and what the logits of the first expert are
# raised by: Qwen3-30B-A3B, few large experts, many small ones, one hot expert, decoding; medium ones, large
# ones, few rows of each, and a hot expert with a sixth of all rows.
_ACCELERATOR = (
    (16384, 2048, 768, 128, 8, 0),
    (8192, 4096, 14336, 8, 2, 0),
    (16384, 2048, 512, 512, 10, 0),
    (16384, 2048, 768, 128, 8, 8),
    (16, 2048, 768, 128, 8, 0),
    (8192, 4096, 1536, 64, 6, 0),
    (16384, 7168, 2048, 32, 8, 0),
    (4096, 2048, 768, 128, 8, 0),
    (8192, 4096, 1536, 64, 6, 8),
)
_CPU = ((2048, 2048, 768, 64, 8, 0), (2048, 1024, 2048, 8, 2, 0))
# Of a block: tokens, hidden size, inner size, experts, experts of a token. SonicMoE compiles for each.
_BLOCKS = ((16384, 2048, 768, 128, 8), (8192, 4096, 1536, 64, 6))


def problems(device: str, *, quick: bool) -> Iterator[Problem]:
    """Yield every size; the experts of a token are the top-k of seeded normal logits."""
    # Liger searches its configurations in the first step, which had not ended after 200 s; 1 lets it.
    os.environ.setdefault("LIGER_FUSED_MOE_AUTOTUNE", "0")
    sizes = _ACCELERATOR if device in accelerator.TYPES else _CPU
    dtype = torch.bfloat16 if device in accelerator.TYPES else torch.float32
    _, absent = peer(device, "quack", "it has products of sorted rows, and no experts")
    absent |= sonic(device, 1)[1]
    for tokens, hidden, inner, experts, top_k, hot in sizes[:2] if quick else sizes:
        x = made(tokens, hidden, device=device, dtype=dtype)
        logits = made(tokens, experts, device=device, dtype=torch.float32)
        logits[:, 0] += hot
        weights, index = torch.topk(logits.softmax(-1), top_k, dim=-1)
        up = made(experts, 2 * inner, hidden, device=device, dtype=dtype).mul_(0.02)
        down = made(experts, hidden, inner, device=device, dtype=dtype).mul_(0.02)
        counts = torch.bincount(index.flatten(), minlength=experts)
        forward = 6 * tokens * top_k * hidden * inner
        yield Problem(
            op="moe_experts",
            shape=f"{tokens} x {hidden} x {inner}, {experts} experts, top {top_k}, "
            f"{counts.min()} to {counts.max()} tokens each, median {counts.median()}",
            leaves=(x, weights.to(dtype), up, down),
            sides=_sides(device, index),
            limit="flops",
            # A backward alone, through a graph that is kept, is none that a training step has: ours writes
            # gradients over what the forward kept, once.
            work={"forward": forward, "step": 3 * forward},
            incoming={"backward": [made(tokens, hidden, device=device, dtype=dtype)]},
            absent=absent,
        )
    if sonic(device, 1)[0]:
        yield from blocks(device, _BLOCKS)


def blocks(device: str, sizes: Sequence[Sequence[int]]) -> Iterator[Problem]:
    """Yield router and experts as one problem; the router's product is not counted."""
    dtype = torch.bfloat16 if device in accelerator.TYPES else torch.float32
    for tokens, hidden, inner, experts, top_k in sizes:
        shapes = ((tokens, hidden), (experts, hidden), (experts, 2 * inner, hidden), (experts, hidden, inner))
        x, router, up, down = (made(*shape, device=device, dtype=dtype) for shape in shapes)
        forward = 6 * tokens * top_k * hidden * inner
        yield Problem(
            op="moe_experts",
            shape=f"{tokens} x {hidden} x {inner}, {experts} experts, top {top_k}, with the router",
            leaves=(x, router.mul_(hidden**-0.5), up.mul_(0.02), down.mul_(0.02)),
            sides=_blocks(device, top_k) | sonic(device, top_k)[0],
            limit="flops",
            work={"forward": forward, "step": 3 * forward},
            incoming={"backward": [made(tokens, hidden, device=device, dtype=dtype)]},
        )


def _blocks(device: str, top_k: int) -> dict[str, Side]:
    routing = formula("moe_router", "softmax_topk")
    sides: dict[str, Side] = {"eager": partial(_block, routing, upstream, top_k)}
    if (grouped := _grouped_mm()) is not None:
        sides["grouped_mm"] = partial(_block, routing, grouped, top_k)
    ours = beside("moe_experts", "gated", device).get("ours")
    if ours is not None:
        router = beside("moe_router", "softmax_topk", device).get("ours", routing)
        sides["ours"] = partial(_block, router, ours, top_k)
    return sides


def _block(routing: Callable[..., Any], experts: Callable[..., Any], top_k: int, *leaves: Tensor) -> Tensor:
    x, router, up, down = leaves
    weights, index = routing(functional.linear(x, router), top_k, True)
    output: Tensor = experts(x, index, weights.to(x.dtype), up, down, functional.silu)
    return output


def _sides(device: str, index: Tensor) -> dict[str, Side]:
    sides: dict[str, Side] = {"eager": partial(_called, upstream, index)}
    grouped = _grouped_mm()
    if grouped is not None:
        sides["grouped_mm"] = partial(_called, grouped, index)
        # Upstream's loop is over what the host reads, at which a graph breaks.
        sides["compile"] = torch.compile(partial(_called, grouped, index), dynamic=False)
    for name, side in beside("moe_experts", "gated", device).items():
        sides[name] = partial(_called, side, index)
    return sides


def _called(side: Callable[..., Any], index: Tensor, *leaves: Tensor) -> Tensor:
    x, weights, up, down = leaves
    output: Tensor = side(x, index, weights, up, down, functional.silu)
    return output


def upstream(
    x: Tensor, index: Tensor, weights: Tensor, up: Tensor, down: Tensor, act_fn: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return what transformers' experts do without an implementation of another name: one after the other."""
    result = torch.zeros_like(x)
    chosen = functional.one_hot(index, len(up) + 1).permute(2, 1, 0)
    for (expert,) in chosen.sum((1, 2)).nonzero():
        place, token = torch.where(chosen[expert])
        gate, value = functional.linear(x[token], up[expert]).chunk(2, dim=-1)
        rows = functional.linear(act_fn(gate) * value, down[expert])
        result.index_add_(0, token, (rows * weights[token, place, None]).to(x.dtype))
    return result


def _grouped_mm() -> Callable[..., Any] | None:
    """transformers' default for experts, where it is installed and has it."""
    try:
        from transformers.integrations import moe
    except ImportError:
        return None
    gate = getattr(moe, "_default_apply_gate", None)
    if gate is None:
        return None

    def run(x: Tensor, index: Tensor, weights: Tensor, up: Tensor, down: Tensor, act_fn: Any) -> Any:
        owner = SimpleNamespace(
            num_experts=len(up), gate_up_proj=up, down_proj=down, act_fn=act_fn, has_gate=True,
            has_bias=False, is_transposed=False, is_concatenated=True, has_post_expert_norm=False,
            _is_expert_parallel=False,
        )  # fmt: skip
        owner._apply_gate = partial(gate, owner)
        return moe.grouped_mm_experts_forward(owner, x, index, weights)

    return run


def sonic(device: str, top_k: int) -> tuple[dict[str, Side], dict[str, str]]:
    """Return the side ``sonic`` of a block of experts, or why there is none; on a CPU both are empty."""
    return peer(device, "sonic", partial(sonic_block, top_k), Package("sonicmoe", "sonic-moe"))


def sonic_block(
    top_k: int, x: torch.Tensor, router: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """Return a softmax router and gated experts of ``x`` ``[tokens, hidden]``, without an auxiliary loss.

    ``up`` is ``[experts, 2 * inner, hidden]``, rows of the gate first, as in checkpoints.
    """
    from sonicmoe.enums import ActivationType
    from sonicmoe.functional import moe_TC_softmax_topk_layer

    stream = torch.cuda.current_stream().cuda_stream
    forward_only = not torch.is_grad_enabled()
    weights = up.permute(1, 2, 0), None, down.permute(1, 2, 0), None
    y: torch.Tensor = moe_TC_softmax_topk_layer(
        x, router, *weights, top_k, stream, ActivationType.SWIGLU, forward_only, concat_layout=True
    )[0]
    return y
