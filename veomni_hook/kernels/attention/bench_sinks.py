"""Attention with sinks under a dense mask, as in DeepSeek-V4: all heads share a key, which is the value, too.

A query sees a causal window, and some of the keys behind it, each of which stands for four positions. Work
counts products of pairs that are seen: 2 forward and 5 backward for each pair, head and column. Upstream
stores the scores of all heads several times: 2.5 GiB each at 4,096 positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from veomni_hook import accelerator
from veomni_hook.kernels.attention import tiles
from veomni_hook.kernels.problem import Problem, Side, formula, made

__all__ = ["problems"]

_VARIANT = "sinks"
# Batch, positions, heads, columns of a head, window, chosen keys.
_ACCELERATOR = ((1, 4096, 64, 512, 128, 512), (2, 2048, 64, 512, 128, 512), (1, 16384, 64, 512, 128, 512))
_CPU = ((1, 128, 4, 32, 16, 8),)
#: Positions that one of the keys behind the window stands for.
_RATE = 4


def problems(device: str, *, quick: bool) -> Iterator[Problem]:
    """Yield every size."""
    sizes = _ACCELERATOR if device in accelerator.TYPES else _CPU
    for batch, positions, heads, width, window, chosen in sizes[:2] if quick else sizes:
        mask = _mask(batch, positions, window, chosen, device)
        query = made(batch, heads, positions, width, device=device)
        key = made(batch, 1, mask.shape[-1], width, device=device)
        sinks = made(heads, device=device)
        eager = partial(_side, attend=formula("attention", _VARIANT), mask=mask)
        sides: dict[str, Side] = {"eager": eager, "compile": torch.compile(eager, dynamic=False)}
        if device == "cuda":
            sides["tiles"] = partial(_side, attend=tiles.with_sinks, mask=mask)
        flops = 4 * int((mask == 0).sum()) * heads * width
        yield Problem(
            op="attention_sinks",
            shape=f"{batch} x {positions}, {heads} heads of {width}, window {window}, {chosen} chosen",
            leaves=(query, key, sinks),
            sides=sides,
            limit="flops",
            work={"forward": flops, "step": flops * 7 // 2},
            incoming={"backward": [made(batch, positions, heads, width, device=device)]},
        )


def _mask(batch: int, positions: int, window: int, chosen: int, device: str) -> torch.Tensor:
    """The window, and behind it chosen keys that stand for positions before the query's own."""
    query = torch.arange(positions, device=device)[:, None]
    key = torch.arange(positions, device=device)
    near = ((key <= query) & (key > query - window)).expand(batch, positions, positions)
    behind = torch.arange(positions // _RATE, device=device)
    scores = torch.rand(batch, positions, len(behind), device=device)
    scores.masked_fill_((behind + 1) * _RATE > query + 1, -1)
    best = scores.topk(min(chosen, len(behind)))
    far = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best.indices, best.values >= 0)
    seen = torch.cat([near, far], -1)[:, None]
    mask = torch.zeros(seen.shape, device=device, dtype=torch.bfloat16)
    return mask.masked_fill_(~seen, torch.finfo(mask.dtype).min)


def _side(
    query: torch.Tensor, key: torch.Tensor, sinks: torch.Tensor, attend: Any, mask: torch.Tensor
) -> Any:
    module = SimpleNamespace(sinks=sinks, num_key_value_groups=query.shape[1], training=True)
    return attend(query, key, key, mask, module, query.shape[-1] ** -0.5)[0]
