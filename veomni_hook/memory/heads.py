"""Attention of long sequences for some heads at a time.

The backward of attention allocates buffers inside of its operator: gradients of queries in float32, and
those of keys and values for each head of queries. Together they are four times as large as queries. Heads do
not meet, so some at a time give the same numbers; dropout would draw others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from veomni_hook.memory import parts

__all__ = ["by_heads"]

#: Rows of queries for each part of the heads.
ROWS = 4096


def by_heads(
    implementation: Callable[..., Any],
    join: Callable[..., torch.Tensor],
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *others: Any,
    **named: Any,
) -> Any:
    """Return what ``implementation`` of attention computes: for some heads at a time where rows are many.

    Args:
        implementation: one of transformers' table.
        join: returns its operands, outputs of some heads each, side by side in axis 2.
        module: the attention module.
        query: of shape [B, heads, S, D].
        key: of shape [B, key heads, T, D].
        value: of shape [B, key heads, T, E].
        others: more operands; the first is the mask.
        named: operands by name.
    """
    heads, key_heads = query.shape[1], key.shape[1]
    number = _number(query.shape[0] * query.shape[2], key_heads)
    if number == 1 or heads % key_heads or any(_differ(module, heads, *others, **named)):
        return implementation(module, query, key, value, *others, **named)
    outputs, weights = zip(
        *(
            implementation(module, *operands, *others, **named)
            for operands in zip(*(torch.chunk(x, number, 1) for x in (query, key, value)), strict=True)
        ),
        strict=True,
    )
    return join(*outputs), None if weights[0] is None else torch.cat(weights, 1)


def _number(rows: int, heads: int) -> int:
    """Return into how many parts to split ``heads`` of keys, a divisor of them."""
    if parts.is_shared():
        return 1
    return max(
        number for number in range(1, heads + 1) if heads % number == 0 and number <= max(1, rows // ROWS)
    )


def _differ(module: nn.Module, heads: int, *others: Any, dropout: Any = None, **named: Any) -> Iterator[bool]:
    """Yield what says that some heads at a time give other numbers: some for each head, or dropout."""
    yield bool(dropout) and module.training
    yield any(weight is not None and weight.shape == (heads,) for weight in module._parameters.values())
    for operand in (*others, *named.values()):
        shape: tuple[int, ...] = getattr(operand, "shape", ())  # of masks that are no tensors, too
        yield len(shape) == 4 and shape[1] != 1
        # A number is of no head: Trainer's count of labels comes here, too.
        yield len(shape) not in (0, 4) and isinstance(operand, torch.Tensor) and operand.is_floating_point()
