"""Projections to gate and up whose width is no multiple of 8, as products that are padded (`widths`).

The modules are called as upstream calls them, with their hooks and wrappers. They get the input as a `Rows`,
which behaves like any tensor except in ``torch.nn.functional.linear``: that pads the weight's rows, and
returns the columns that exist, a view. Gated kernels read rows at any stride.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional

from veomni_hook.kernels.gated_mlp.linear_input import LinearInput, plain, replaceable
from veomni_hook.kernels.gated_mlp.widths import cut, missing, padded
from veomni_hook.kernels.shared.autograd import differentiable
from veomni_hook.kernels.shared.operand_checks import count_as_plain

__all__ = ["Rows", "prepare", "projected"]

Tensor = torch.Tensor


def prepare(slot: Any) -> None:
    """Give a slot what guards in towers call (`veomni_hook.patches.idioms.gated_mlp`)."""
    slot.projected = projected


def projected(
    gate: Callable[[Tensor], Tensor], up: Callable[[Tensor], Tensor], x: Tensor
) -> tuple[Tensor, Tensor]:
    """Return ``gate(x)`` and ``up(x)``.

    Args:
        gate: a module; if it has a ``weight`` ``[intermediate, hidden]``, its products may be padded.
        up: the same.
        x: ``[..., hidden]``.

    Returns:
        Two tensors ``[..., intermediate]``, whose rows may be further apart than they are long.
    """
    weight = getattr(gate, "weight", None)
    if (
        type(x) is Tensor
        and isinstance(weight, Tensor)
        and missing(x, weight.shape[0])
        and not torch.compiler.is_compiling()
    ):
        x = x.as_subclass(Rows)
    return gate(x), up(x)


class Rows(LinearInput):
    """The input of projections."""

    @staticmethod
    def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """Return the product with padded rows of the weight, or None if torch's is as good."""
        if not replaceable(x, weight, bias) or not missing(x, weight.shape[0]):
            return None
        return _padded_linear(plain(x), weight, bias)


# Kernels may read its memory as usual.
count_as_plain(Rows)


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    columns = missing(x, weight.shape[0])
    wide = None if bias is None else padded(bias, columns)
    return cut(functional.linear(x, _more_rows(weight, columns), wide), columns)


def _gradients(
    saved: Sequence[Tensor], _: object, wanted: Sequence[bool], dy: Tensor
) -> tuple[Tensor | None, ...]:
    x, weight, _bias = saved
    to_x, to_weight, to_bias = wanted
    columns = missing(x, weight.shape[0])
    wide = padded(dy, columns) if to_x or to_weight else dy
    dx = torch.matmul(wide, _more_rows(weight, columns)) if to_x else None
    dweight = (wide.flatten(0, -2).t() @ x.flatten(0, -2))[: weight.shape[0]] if to_weight else None
    return dx, dweight, dy.flatten(0, -2).sum(0) if to_bias else None


def _more_rows(weight: Tensor, rows: int) -> Tensor:
    return functional.pad(weight, (0, 0, 0, rows))


_padded_linear: Callable[..., Tensor] = differentiable(_forward, _gradients, functional.linear, tensors=3)
