"""Routers of experts: forward reads the logits and writes a few weights, backward writes gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from veomni_hook import accelerator
from veomni_hook.kernels.problem import Problem, Side, made, sides_of

__all__ = ["problems"]

# Tokens, experts, experts of a token; groups and good ones, or None: a softmax, normalised.
_ACCELERATOR = ((16384, 128, 8, None), (65536, 128, 8, None), (16384, 256, 8, (8, 4)))
_CPU = ((16384, 128, 8, None), (4096, 64, 8, None), (4096, 256, 8, (8, 4)))


def problems(device: str, *, quick: bool) -> Iterator[Problem]:
    """Yield every size."""
    for tokens, experts, top_k, groups in _ACCELERATOR if device in accelerator.TYPES else _CPU:
        # As upstream's modules hand them over: grouped routers project in float32.
        logits = made(tokens, experts, device=device, dtype=torch.float32 if groups else torch.bfloat16)
        weights = made(tokens, top_k, device=device, dtype=torch.float32)
        results = weights.nbytes + tokens * top_k * torch.int64.itemsize
        kind = "softmax" if groups is None else f"sigmoid, {groups[1]} of {groups[0]} groups"
        operands: tuple[object, ...] = (top_k, True)
        if groups is not None:
            bias = torch.linspace(0, 0.1, experts, device=device)
            operands = (bias, top_k, experts, *groups, True, -math.inf, False)
        variant = "softmax_topk" if groups is None else "grouped_topk"
        yield Problem(
            op="moe_router",
            shape=f"{tokens} x {experts}, top {top_k}, {kind}",
            leaves=[logits],
            sides=sides_of("moe_router", variant, device, call=_weights, operands=operands),
            limit="bytes",
            work={"forward": logits.nbytes + results, "backward": logits.nbytes + results},
            incoming={"backward": [weights]},
        )


def _weights(routing: Side, logits: torch.Tensor, operands: Sequence[object]) -> torch.Tensor:
    return routing(logits, *operands)[0]
