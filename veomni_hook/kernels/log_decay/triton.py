"""Decays in Triton: one launch forward, one backward, and one that adds up the sums over positions.

`veomni_hook.kernels.log_decay.device` has the formulas. Shapes: a, b ``[..., heads]`` in float32, bfloat16 or
float16, strided; log_rate, bias ``[heads]`` in any of these. Saved: a, log_rate, bias and sigmoid(b).
Mutates: nothing. Deterministic: programs have fixed rows, and there are no atomics.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

from veomni_hook.kernels.log_decay import device as kernels
from veomni_hook.kernels.log_decay import reference
from veomni_hook.kernels.log_decay.rules import fits
from veomni_hook.kernels.shared.autograd import differentiable
from veomni_hook.kernels.shared.launch import LAUNCHES, Launch, cdiv, power, room
from veomni_hook.kernels.shared.operators import operator
from veomni_hook.kernels.shared.rows import Rows, readable

__all__ = [
    "add_up",
    "forward_programs",
    "refuses",
    "softplus",
    "softplus_and_sigmoid",
]

Tensor = torch.Tensor
_DTYPES = frozenset((torch.float32, torch.bfloat16, torch.float16))
# Elements of a program's tile, the most heads, and the backward's programs for each multiprocessor: with one,
# 4,194,304 x 32 took 2.15 ms on an H200, torch.compile's 0.83. At 16,384 x 32 there are fewer in any case.
_TILE, _MOST_HEADS, _PROGRAMS = 1024, 1024, 8
# Blocks of a forward program: the more, the less often it reads rates and biases.
_STEPS = 4


# Cached by all that Triton specialises on.
@lru_cache(maxsize=LAUNCHES)
def _forward_launch(
    device: torch.device, dtypes: tuple[torch.dtype, ...], heads: int, at: tuple[Rows, Rows], *, both: bool
) -> Launch:
    block = power(heads)
    return Launch(kernels.forward, 6, heads, block, _rows(block), both, num_warps=4)


@lru_cache(maxsize=LAUNCHES)
def _backward_launch(
    device: torch.device, dtypes: tuple[torch.dtype, ...], heads: int, at: Rows, *, both: bool
) -> Launch:
    block = power(heads)
    return Launch(kernels.backward, 9, heads, block, _rows(block), both, num_warps=4)


@lru_cache(maxsize=LAUNCHES)
def _sums_launch(
    device: torch.device, dtypes: tuple[torch.dtype, ...], columns: int, width: int, *, rounded: bool
) -> Launch:
    block = power(width)
    rows = max(1, 4 * _TILE // block)
    return Launch(kernels.add_up, 4, columns, width, block, rows, rounded, num_warps=4)


def add_up(
    partial: Tensor, log_rate: Tensor, bias: Tensor, factor: float, *, rounded: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the gradients of ``log_rate`` and ``bias`` from what a backward's programs have summed up.

    Args:
        partial: float32 ``[programs, 2, columns]``: sums for rate and bias, without ``factor * rate``.
        log_rate: one for each head; columns of a head are neighbours.
        bias: ``[columns]``.
        factor: what both sums are multiplied by, beside the rate.
        rounded: whether the rate is rounded to the dtype of ``log_rate``.
    """
    of_rate, of_bias = torch.empty_like(log_rate), torch.empty_like(bias)
    heads, columns = log_rate.numel(), partial.shape[-1]
    if columns:
        dtypes = log_rate.dtype, bias.dtype
        launch = _sums_launch(partial.device, dtypes, columns, columns // heads, rounded=rounded)
        launch((heads, 1, 1), partial, log_rate, of_rate, of_bias, len(partial), factor)
    return of_rate, of_bias


def forward_programs(blocks: int, across: int, device: torch.device) -> int:
    """Return how many programs share ``blocks`` blocks of rows, with ``across`` beside each other."""
    return max(1, cdiv(blocks, _STEPS), min(blocks, _PROGRAMS * room(device)[0] // across))


def _rows(block: int) -> int:
    return max(1, _TILE // block)


@operator(
    lambda a, b, log_rate, bias: (
        a.new_empty(a.shape, dtype=torch.float32),
        a.new_empty(0, dtype=torch.float32) if b is None else b.new_empty(b.shape),
    )
)
def _log_decay(a: Tensor, b: Tensor | None, log_rate: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    both = b is not None
    b = a if b is None else b
    (a, at), (b, b_at) = readable(a), readable(b)
    heads = a.shape[-1]
    g = torch.empty(a.shape, dtype=torch.float32, device=a.device)
    beta = torch.empty(b.shape, dtype=b.dtype, device=b.device) if both else g
    if rows := a.numel() // max(heads, 1):
        dtypes = a.dtype, b.dtype, log_rate.dtype, bias.dtype
        launch = _forward_launch(a.device, dtypes, heads, (at, b_at), both=both)
        grid = forward_programs(cdiv(rows, _rows(power(heads))), 1, a.device), 1, 1
        launch(grid, a, b, log_rate, bias, g, beta, rows, *at, *b_at)
    return g, beta if both else g.new_empty(0)


@operator(
    lambda a, beta, log_rate, bias, dg, dbeta: (
        a.new_empty(a.shape),
        dg.new_empty(0) if beta is None else beta.new_empty(beta.shape),
        log_rate.new_empty(log_rate.shape),
        bias.new_empty(bias.shape),
    )
)
def _log_decay_backward(
    a: Tensor, beta: Tensor | None, log_rate: Tensor, bias: Tensor, dg: Tensor, dbeta: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    a, at = readable(a)
    heads = a.shape[-1]
    rows = a.numel() // max(heads, 1)
    da = torch.empty(a.shape, dtype=a.dtype, device=a.device)
    both = beta is not None and dbeta is not None
    dg = dg.contiguous()
    beta, dbeta = (beta, dbeta.contiguous()) if beta is not None and dbeta is not None else (dg, dg)
    db = torch.empty_like(beta) if both else dg.new_empty(0)
    block = _rows(power(heads))
    programs = max(1, min(_PROGRAMS * room(a.device)[0], cdiv(rows, block)))
    partial = torch.empty(programs, 2, heads, dtype=torch.float32, device=a.device)
    dtypes = a.dtype, beta.dtype, log_rate.dtype, bias.dtype
    launch = _backward_launch(a.device, dtypes, heads, at, both=both)
    operands = a, beta, log_rate, bias, dg, dbeta, da, db if both else da, partial
    launch((programs, 1, 1), *operands, rows, *at)
    return da, db, *add_up(partial, log_rate, bias, -1.0)


def _definition(a: Tensor, b: Tensor | None, log_rate: Tensor, bias: Tensor) -> tuple[Tensor, Tensor | None]:
    return reference.softplus(a, log_rate, bias), None if b is None else b.sigmoid()


def _gradients(saved: Sequence[Any], _: Any, __: Any, dg: Tensor, dbeta: Tensor) -> tuple[Tensor | None, ...]:
    a, b, log_rate, bias, beta = saved
    if b is None:
        return _log_decay_backward(a, None, log_rate, bias, dg, None)
    return _log_decay_backward(a, beta, log_rate, bias, dg, dbeta)


#: Takes a, b or None, the logarithm of the rate, the bias.
_decay: Callable[..., tuple[Tensor, Tensor]] = differentiable(
    _log_decay, _gradients, _definition, tensors=4, results=2, reread=(1,)
)


def softplus(a: Tensor, log_rate: Tensor, bias: Tensor) -> Tensor:
    """Return ``-exp(log_rate) * softplus(a + bias)``, float32 ``[..., heads]``."""
    if not fits(a, log_rate, bias) or a.dtype not in _DTYPES:
        return reference.softplus(a, log_rate, bias)
    return _decay(a, None, log_rate, bias)[0]


def softplus_and_sigmoid(a: Tensor, log_rate: Tensor, bias: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``sigmoid(b)`` in the dtype of ``b``, and `softplus`."""
    if not fits(a, log_rate, bias):
        return reference.softplus_and_sigmoid(a, log_rate, bias, b)
    g, beta = _decay(a, b, log_rate, bias)
    return beta, g


def refuses(owner: Any, x: Tensor, log_rate: Tensor, bias: Tensor, *b: Tensor) -> str | None:
    """Return what the kernels refuse, beside `rules`, or None."""
    for each in (x, log_rate, bias, *b):
        if each.dtype not in _DTYPES:
            return f"the kernel does not support {each.dtype}"
        if each.device != x.device:
            return "the operands are on different devices"
    if not (log_rate.is_contiguous() and bias.is_contiguous()):
        return "a parameter is not contiguous"
    return None if len(log_rate) <= _MOST_HEADS else f"more than {_MOST_HEADS} heads"
