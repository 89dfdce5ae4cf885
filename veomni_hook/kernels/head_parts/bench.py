"""Heads of DeepSeek-V3's attention, and smaller ones of its kind: queries, and keys beside values.

Queries are split and joined again, with a rotation of the second part between, which is left out here. Keys
have the first part of what is split; their second part is one for all heads, and the rest are values.
Forward reads what is joined and writes it; backward reads the gradients and writes that of the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from veomni_hook import accelerator
from veomni_hook.kernels.problem import Problem, Results, beside, formula, made

__all__ = ["problems"]

# Sequences, positions, heads, and the widths of both parts.
_ACCELERATOR = ((4, 4096, 128, 128, 64), (2, 4096, 64, 192, 64), (2, 4096, 32, 128, 64))
_CPU = ((1, 64, 8, 32, 16),)


def problems(device: str, *, quick: bool) -> Iterator[Problem]:
    """Yield queries and keys of every size."""
    sizes = _ACCELERATOR if device in accelerator.TYPES else _CPU
    for batch, length, heads, first, second in sizes[:1] if quick else sizes:
        heads_of = partial(made, batch, length, heads, device=device)
        whole, gradient = heads_of(first + second), heads_of(first + second).transpose(1, 2)
        shape = f"{batch} x {length}, {heads} x ({first} + {second})"
        yield Problem(
            op="head_parts",
            shape=shape,
            leaves=(whole,),
            sides=_sides(device, partial(_queries, first=first)),
            limit="bytes",
            work={"forward": 2 * whole.nbytes, "backward": 2 * whole.nbytes},
            incoming={"backward": [gradient]},
        )
        whole, shared = heads_of(2 * first), made(batch, length, 1, second, device=device)
        half, values = whole.nbytes // 2, heads_of(first).transpose(1, 2)
        yield Problem(
            op="head_parts",
            shape=f"{shape} of keys",
            leaves=(whole, shared),
            sides=_sides(device, partial(_keys, first=first)),
            limit="bytes",
            work={
                "forward": half + shared.nbytes + gradient.nbytes,
                "backward": 2 * whole.nbytes + gradient.nbytes - half + shared.nbytes,
            },
            incoming={"backward": [gradient, values]},
        )


def _sides(device: str, call: Callable[..., Results]) -> dict[str, Callable[..., Results]]:
    eager = partial(call, *(formula("head_parts", variant) for variant in ("split", "joined")))
    kernels = [beside("head_parts", variant, device) for variant in ("split", "joined")]
    ours = {name: partial(call, *(side[name] for side in kernels)) for name in kernels[0]}
    return {"eager": eager, "compile": torch.compile(eager, dynamic=False), **ours}


def _queries(split: Any, join: Any, whole: torch.Tensor, *, first: int) -> Results:
    x = whole.transpose(1, 2)
    joined: torch.Tensor = join(split(x, [first, x.shape[-1] - first], -1, torch.split), -1, torch.cat)
    return joined


def _keys(split: Any, join: Any, whole: torch.Tensor, shared: torch.Tensor, *, first: int) -> Results:
    keys, values = split(whole.transpose(1, 2), [first, first], -1, torch.split)
    return join((keys, shared.transpose(1, 2).expand(*keys.shape[:-1], -1)), -1, torch.cat), values
