"""Experts for some tokens at a time, where memory is scarce.

A token has as many rows as experts that it chose, each as wide as its hidden states: of all tokens' rows, a
tile has no more than `ROWS` times the size of the hidden states, and no more than `MOST`. Weights with
gradients run on all tokens at once: each tile would add to gradients of all experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from veomni_hook.kernels.moe_experts.forms import Form, Operands
from veomni_hook.kernels.moe_experts.operators import Backend, Gradients, Needed
from veomni_hook.kernels.shared.sizes import SIZES

__all__ = ["tiled"]

#: Rows of experts for each token of a tile, and the fewest rows of an expert: fewer wait for its weights.
ROWS, LEAST = 4, 256
#: The most rows of experts in a tile: more are no faster.
MOST = 131_072


def tiled(backend: Backend, operands: Operands) -> Backend:
    """Return ``backend`` for tiles of these operands; itself if all tokens run at once."""
    if not SIZES.least or is_dynamo_compiling() or not backend.spends:
        return backend
    x, index, _, *weights = operands
    number = max(-(-index.shape[-1] // ROWS), -(-index.numel() // MOST))
    number = min(number, index.numel() // (LEAST * operands.up.shape[0]))
    if number < 2 or any(weight is not None and weight.requires_grad for weight in weights):
        return backend
    size = -(-x.shape[0] // number)
    return Backend(partial(_forward, backend, size), partial(_backward, backend, size), spends=True)


def _tiles(operands: Operands, size: int) -> Iterator[tuple[slice, Operands]]:
    for start in range(0, operands.hidden_states.shape[0], size):
        part = slice(start, start + size)
        x, index, weights = (tensor[part] for tensor in operands[:3])
        yield part, operands._replace(hidden_states=x, top_k_index=index, top_k_weights=weights)


def _forward(
    backend: Backend, size: int, operands: Operands, adapters: Any, form: Form, *, keep: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    result = torch.empty_like(operands.hidden_states, memory_format=torch.contiguous_format)
    for part, tile in _tiles(operands, size):
        result[part] = backend.forward(tile, adapters, form, keep=False)[0]
    return result, ()


def _backward(
    backend: Backend,
    size: int,
    grad: Tensor,
    operands: Operands,
    adapters: Any,
    kept: tuple[Tensor, ...],
    form: Form,
    needed: Needed,
) -> Gradients:
    tiles = [
        backend.backward(grad[part], tile, adapters, (), form, needed)
        for part, tile in _tiles(operands, size)
    ]
    # The first two are of tokens, the others of what all tokens share.
    ways: list[Callable[[Any], Tensor]] = [torch.cat, torch.cat, *([_sum] * (len(needed) - 2))]
    slopes = zip(ways, zip(*tiles, strict=True), needed, strict=True)
    return Gradients(*(way(parts) if want else None for way, parts, want in slopes))


def _sum(parts: Sequence[Tensor]) -> Tensor:
    return torch.stack([part.float() for part in parts]).sum(0)
