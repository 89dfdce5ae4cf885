"""Attention without sinks, turned into attention with them: ``x * sigmoid(lse - sink)`` in one pass.

An operator of its own: Inductor must not fuse this with flex_attention. In torch 2.11 on a GPU it then read
the sums of the backward at strides that they do not have, for lengths that are no multiple of 128, and
gradients were wrong (the sinks' by 96 %). Formulas: `veomni_hook.kernels.attention.rescaled_device`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch

from veomni_hook.kernels.attention import rescaled_device as kernels
from veomni_hook.kernels.shared.autograd import differentiable
from veomni_hook.kernels.shared.launch import LAUNCHES, Launch, cdiv, power
from veomni_hook.kernels.shared.operators import operator
from veomni_hook.kernels.shared.rows import dense_rows

__all__ = ["rescaled"]

#: Values of a program.
_TILE = 4096


@lru_cache(maxsize=LAUNCHES)
def _launch(
    name: str, device: torch.device, dtypes: tuple[torch.dtype, ...], columns: int, numbers: tuple[int, ...]
) -> tuple[Launch, int]:
    """Return the launcher for these numbers, and the positions per program."""
    rows = max(1, min(_TILE // columns, power(numbers[0])))
    tensors = 4 if name == "forward" else 6
    return Launch(getattr(kernels, name), tensors, columns, rows, num_warps=4), rows


@operator(
    lambda x, lse, sinks: x.new_empty(x.shape[0], x.shape[2], x.shape[1], x.shape[3]),
)
def _rescaled(x: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    batch, heads, length, columns = x.shape
    x, lse = dense_rows(x), lse.contiguous()
    y = x.new_empty(batch, length, heads, columns)
    if y.numel():
        numbers = length, *x.stride()[:3], *_by_head(y)
        launch, rows = _launch("forward", x.device, (x.dtype, sinks.dtype), columns, numbers)
        launch((cdiv(length, rows), heads, batch), x, lse, sinks.contiguous(), y, *numbers)
    return y


@operator(lambda x, lse, sinks, dy: (torch.empty_like(dense_rows(x)), lse.new_empty(lse.shape)))
def _rescaled_backward(
    x: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor, dy: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, length, columns = x.shape
    x, lse, dy = dense_rows(x), lse.contiguous(), dense_rows(dy)
    dx, dlse = torch.empty_like(x), torch.empty_like(lse)
    if dx.numel():
        numbers = length, *x.stride()[:3], *_by_head(dy), *dx.stride()[:3]
        launch, rows = _launch("backward", x.device, (x.dtype, dy.dtype, sinks.dtype), columns, numbers)
        launch((cdiv(length, rows), heads, batch), x, lse, sinks.contiguous(), dy, dx, dlse, *numbers)
    return dx, dlse


def _by_head(y: torch.Tensor) -> tuple[int, int, int]:
    """Return the strides of the batch, the head and the position of ``[batch, length, heads, head_dim]``."""
    batch, position, head, _ = y.stride()
    return batch, head, position


def _gradients(
    saved: Sequence[torch.Tensor], _: object, wanted: Sequence[bool], dy: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    if dy is None:  # a recorded backward of what `with_formula` has wrapped
        return None, None, None
    dx, dlse = _rescaled_backward(*saved, dy)
    return dx, dlse, (-dlse.sum((0, 2))).to(saved[2].dtype) if wanted[2] else None


def _definition(x: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    share = (lse - sinks.view(1, -1, 1)).float().sigmoid()
    return (x * share.unsqueeze(-1).to(x.dtype)).transpose(1, 2)


#: Returns ``x * sigmoid(lse - sinks)`` with the positions in front of the heads: ``[batch, length, heads,
#: head_dim]``, contiguous, in the dtype of ``x``. It takes ``x [batch, heads, length, head_dim]``, 16-bit or
#: float32, whose ``head_dim`` is a power of two, ``lse [batch, heads, length]`` in float32, and
#: ``sinks [heads]``.
rescaled: Callable[..., torch.Tensor] = differentiable(
    _rescaled, _gradients, _definition, tensors=3, sparse=True
)
