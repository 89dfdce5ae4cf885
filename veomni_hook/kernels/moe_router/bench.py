"""Routers of experts: forward reads the logits and writes a few weights, backward writes gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from veomni_hook import accelerator
from veomni_hook.kernels.problem import Problem, Side, beside, formula, made

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
        yield Problem(
            op="moe_router",
            shape=f"{tokens} x {experts}, top {top_k}, {kind}",
            leaves=[logits],
            sides=_sides(device, experts, top_k, groups),
            limit="bytes",
            work={"forward": logits.nbytes + results, "backward": logits.nbytes + results},
            incoming={"backward": [weights]},
        )


def _sides(device: str, experts: int, top_k: int, groups: tuple[int, int] | None) -> dict[str, Side]:
    if groups is None:
        variant, operands = "softmax_topk", (top_k, True)
    else:
        bias = torch.linspace(0, 0.1, experts, device=device)
        variant, operands = "grouped_topk", (bias, top_k, experts, *groups, True, -math.inf, False)  # type: ignore[assignment]
    eager = partial(_weights, formula("moe_router", variant), operands)
    found: dict[str, Side] = {"eager": eager, "compile": torch.compile(eager, dynamic=False)}
    for name, side in beside("moe_router", variant, device).items():
        found[name] = partial(_weights, side, operands)
    return found


def _weights(routing: Callable[..., Any], operands: tuple[Any, ...], logits: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = routing(logits, *operands)[0]
    return found
