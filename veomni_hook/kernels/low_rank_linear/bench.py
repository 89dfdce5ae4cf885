"""A frozen linear layer with a trained term of low rank.

Counted is the work of the layer alone, two wide products in a step: ``x W^T`` and ``dy W``.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch.nn import functional

from veomni_hook import accelerator
from veomni_hook.kernels.low_rank_linear.torch import linear_with_term
from veomni_hook.kernels.problem import Problem, made

__all__ = ["problems"]

# Rows, input, output, rank; the dtype of the adapter.
_ACCELERATOR = (
    (8192, 4096, 12288, 16, "bfloat16"),
    (8192, 4096, 12288, 16, "float32"),
    (8192, 4096, 4096, 16, "bfloat16"),
    (8192, 4096, 4096, 16, "float32"),
    (8192, 12288, 4096, 64, "bfloat16"),
    (8192, 12288, 4096, 64, "float32"),
)
_CPU = ((512, 1024, 1024, 16, "float32"),)
_SCALE = 2.0


def problems(device: str, *, quick: bool) -> Iterator[Problem]:
    """Yield every size; the layer and x are in bfloat16, on a CPU in float32."""
    on_accelerator = device in accelerator.TYPES
    dtype = torch.bfloat16 if on_accelerator else torch.float32
    sizes = _ACCELERATOR if on_accelerator else _CPU
    for rows, inner, outer, rank, kind in sizes[:2] if quick else sizes:
        factors = getattr(torch, kind)
        x = made(rows, inner, device=device, dtype=dtype)
        weight = made(outer, inner, device=device, dtype=dtype) * inner**-0.5
        down = made(rank, inner, device=device, dtype=factors) * inner**-0.5
        up = made(outer, rank, device=device, dtype=factors) * rank**-0.5
        eager = partial(upstream, weight=weight)
        yield Problem(
            op="low_rank_linear",
            shape=f"{rows} x {inner} x {outer}, rank {rank} {kind}",
            leaves=(x, down, up),
            sides={
                "eager": eager,
                "compile": torch.compile(eager, dynamic=False),
                "ours": partial(_ours, weight=weight),
            },
            limit="flops",
            work={"forward": 2 * rows * inner * outer, "step": 4 * rows * inner * outer},
            incoming={"backward": [torch.randn_like(eager(x, down, up))]},
        )


def upstream(x: torch.Tensor, down: torch.Tensor, up: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return what PEFT computes, which converts x to the adapter's dtype and the sum to that of x."""
    term = functional.linear(functional.linear(x.to(down.dtype), down), up) * _SCALE
    return (functional.linear(x, weight) + term).to(x.dtype)


def _ours(x: torch.Tensor, down: torch.Tensor, up: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return linear_with_term(x, weight, None, down, up, _SCALE)
