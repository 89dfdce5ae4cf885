"""Decays in Triton: one launch forward, one backward, and one that adds up the sums over positions.

`veomni_hook.kernels.log_decay.device` has the formulas. Shapes: a, b ``[..., heads]`` in float32, bfloat16 or
float16, strided; log_rate, bias ``[heads]`` in any of these. With a decay for each channel: x ``[batch,
positions, heads, width]``, log_rate ``[1, 1, heads, 1]``, bias ``[heads * width]``. Saved: the operands, and
sigmoid(b). Mutates: nothing. Deterministic: programs have fixed rows, and there are no atomics.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial

import torch

from veomni_hook.kernels.log_decay import device as kernels
from veomni_hook.kernels.log_decay import reference
from veomni_hook.kernels.log_decay.rules import fits, fits_channels
from veomni_hook.kernels.shared.autograd import differentiable
from veomni_hook.kernels.shared.launch import LAUNCHES, Launch, cdiv, power, room
from veomni_hook.kernels.shared.operand_checks import DTYPES
from veomni_hook.kernels.shared.operators import operator
from veomni_hook.kernels.shared.rows import Rows, readable

__all__ = [
    "channels",
    "channels_rounded_rate",
    "refuses",
    "refuses_channels",
    "softplus",
    "softplus_and_sigmoid",
]

Tensor = torch.Tensor
# Elements of a program's tile, the most heads, and the backward's programs for each multiprocessor: with one,
# 4,194,304 x 32 took 2.15 ms on an H200, torch.compile's 0.83. At 16,384 x 32 there are fewer in any case.
_TILE, _MOST_HEADS, _PROGRAMS = 1024, 1024, 8
# Blocks of a forward program: the more, the less often it reads rates and biases.
_STEPS = 4
# With a decay for each channel: columns and rows of a program's tile, columns of a warp (8 of each thread),
# the widest head, and the backward's warps for each multiprocessor: each program of it writes sums of its
# columns.
_COLUMNS, _ROWS, _WARP, _WIDEST, _WARPS = 1024, 4, 256, 1024, 16


# Cached by all that Triton specialises on.
@lru_cache(maxsize=LAUNCHES)
def _launch(
    device: torch.device,
    dtypes: tuple[torch.dtype, ...],
    heads: int,
    at: tuple[Rows, ...],
    *,
    both: bool,
    back: bool,
) -> tuple[Launch, int]:
    """Return the launcher, and the rows of a block."""
    block = power(heads)
    rows = max(1, _TILE // block)
    function, tensors = (kernels.backward, 9) if back else (kernels.forward, 6)
    return Launch(function, tensors, heads, block, rows, both, num_warps=4), rows


@lru_cache(maxsize=LAUNCHES)
def _channel_launch(
    device: torch.device,
    dtypes: tuple[torch.dtype, ...],
    sizes: tuple[int, int],
    at: Rows,
    *,
    bounded: bool,
    rounded: bool,
    back: bool,
) -> tuple[Launch, int, int]:
    """Return the launcher, the programs beside each other for all columns, and the warps of a program."""
    columns, width = sizes
    block = min(_COLUMNS, power(columns))
    warps = max(1, block // _WARP)
    constants = columns, width, block, _ROWS, bounded, rounded
    function, tensors = (kernels.backward_channels, 6) if back else (kernels.forward_channels, 4)
    return Launch(function, tensors, *constants, num_warps=warps), cdiv(columns, block), warps


@lru_cache(maxsize=LAUNCHES)
def _sums_launch(
    device: torch.device, dtypes: tuple[torch.dtype, ...], columns: int, width: int, *, rounded: bool
) -> Launch:
    block = power(width)
    rows = max(1, 4 * _TILE // block)
    return Launch(kernels.add_up, 4, columns, width, block, rows, rounded, num_warps=4)


def _add_up(
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


def _forward_programs(blocks: int, across: int, device: torch.device) -> int:
    """Return how many programs share ``blocks`` blocks of rows, with ``across`` beside each other."""
    return max(1, cdiv(blocks, _STEPS), min(blocks, _PROGRAMS * room(device)[0] // across))


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
        launch, block = _launch(a.device, dtypes, heads, (at, b_at), both=both, back=False)
        grid = _forward_programs(cdiv(rows, block), 1, a.device), 1, 1
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
    dtypes = a.dtype, beta.dtype, log_rate.dtype, bias.dtype
    launch, block = _launch(a.device, dtypes, heads, (at,), both=both, back=True)
    programs = max(1, min(_PROGRAMS * room(a.device)[0], cdiv(rows, block)))
    partial = torch.empty(programs, 2, heads, dtype=torch.float32, device=a.device)
    operands = a, beta, log_rate, bias, dg, dbeta, da, db if both else da, partial
    launch((programs, 1, 1), *operands, rows, *at)
    return da, db, *_add_up(partial, log_rate, bias, -1.0)


def _definition(a: Tensor, b: Tensor | None, log_rate: Tensor, bias: Tensor) -> tuple[Tensor, Tensor | None]:
    return reference.softplus(a, log_rate, bias), None if b is None else b.sigmoid()


def _gradients(
    saved: tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor],
    _: object,
    __: object,
    dg: Tensor,
    dbeta: Tensor,
) -> tuple[Tensor | None, ...]:
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
    if not fits(a, log_rate, bias) or a.dtype not in DTYPES:
        return reference.softplus(a, log_rate, bias)
    return _decay(a, None, log_rate, bias)[0]


def softplus_and_sigmoid(a: Tensor, log_rate: Tensor, bias: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``sigmoid(b)`` in the dtype of ``b``, and `softplus`."""
    if not fits(a, log_rate, bias):
        return reference.softplus_and_sigmoid(a, log_rate, bias, b)
    g, beta = _decay(a, b, log_rate, bias)
    return beta, g


def _factor(lower: float | None) -> float:
    return -1.0 if lower is None else lower


@operator(lambda x, log_rate, bias, dtype, lower, rounded: x.new_empty(x.shape, dtype=dtype))
def _log_decay_channels(
    x: Tensor,
    log_rate: Tensor,
    bias: Tensor,
    dtype: torch.dtype,
    lower: float | None,
    rounded: bool,
) -> Tensor:
    width, (flat, at) = x.shape[-1], readable(x.flatten(-2))
    columns = flat.shape[-1]
    g = torch.empty(x.shape, dtype=dtype, device=x.device)
    if g.numel():
        dtypes = x.dtype, log_rate.dtype, bias.dtype, dtype
        launch, across, _ = _channel_launch(
            x.device, dtypes, (columns, width), at, bounded=lower is not None, rounded=rounded, back=False
        )
        rows = flat.numel() // columns
        grid = across, _forward_programs(cdiv(rows, _ROWS), across, x.device), 1
        launch(grid, flat, log_rate, bias, g, rows, _factor(lower), *at)
    return g


@operator(
    lambda x, log_rate, bias, *others: (
        x.new_empty(x.shape),
        log_rate.new_empty(log_rate.shape),
        bias.new_empty(bias.shape),
    )
)
def _log_decay_channels_backward(
    x: Tensor,
    log_rate: Tensor,
    bias: Tensor,
    dg: Tensor,
    lower: float | None,
    rounded: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    width, (flat, at) = x.shape[-1], readable(x.flatten(-2))
    columns = flat.shape[-1]
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not dx.numel():
        return dx, torch.zeros_like(log_rate), torch.zeros_like(bias)
    dg = dg.contiguous()
    dtypes = x.dtype, log_rate.dtype, bias.dtype, dg.dtype
    launch, across, warps = _channel_launch(
        x.device, dtypes, (columns, width), at, bounded=lower is not None, rounded=rounded, back=True
    )
    rows = flat.numel() // columns
    most = _WARPS * room(x.device)[0] // (warps * across)
    programs = max(1, min(most, cdiv(rows, _ROWS)))
    partial = torch.empty(programs, 2, columns, dtype=torch.float32, device=x.device)
    launch((across, programs, 1), flat, log_rate, bias, dg, dx, partial, rows, _factor(lower), *at)
    return dx, *_add_up(partial, log_rate, bias, _factor(lower), rounded=rounded)


def _channel_definition(
    x: Tensor,
    log_rate: Tensor,
    bias: Tensor,
    dtype: torch.dtype,
    lower: float | None,
    rounded: bool,
) -> Tensor:
    formula = reference.channels_rounded_rate if rounded else reference.channels
    return formula(x, log_rate, bias, dtype, lower is not None, lower)


_channel_decay: Callable[..., Tensor] = differentiable(
    _log_decay_channels,
    lambda saved, rest, wanted, dg: _log_decay_channels_backward(*saved, dg, *rest[1:]),
    _channel_definition,
    tensors=3,
)


def channels(
    x: Tensor,
    log_rate: Tensor,
    bias: Tensor,
    dtype: torch.dtype | None,
    bounded: bool,
    lower: float | None,
    *,
    rounded: bool = False,
) -> Tensor:
    """Return the decay of each channel in ``dtype`` (None: float32), shaped as ``x``.

    ``rounded``: ``exp(log_rate)`` is rounded to the dtype of ``log_rate``.
    """
    dtype, least = dtype or torch.float32, lower if bounded else None
    if not fits_channels(x, log_rate, bias) or x.dtype not in DTYPES:
        return _channel_definition(x, log_rate, bias, dtype, least, rounded)
    # Autocast lets torch's exponential return float32.
    rounded = rounded and not (x.is_cuda and torch.is_autocast_enabled("cuda"))
    return _channel_decay(x, log_rate, bias, dtype, None if least is None else float(least), rounded)


channels_rounded_rate = partial(channels, rounded=True)


def refuses(owner: object, x: Tensor, log_rate: Tensor, bias: Tensor, *b: Tensor) -> str | None:
    """Return what the kernels refuse, beside `rules`, or None."""
    reason = _unsuited((x, log_rate, bias, *b))
    return reason or (None if len(log_rate) <= _MOST_HEADS else f"more than {_MOST_HEADS} heads")


def refuses_channels(
    owner: object, x: Tensor, log_rate: Tensor, bias: Tensor, dtype: torch.dtype | None, *bound: object
) -> str | None:
    """Return what the kernels of a decay for each channel refuse, beside `rules`, or None."""
    if (reason := _unsuited((x, log_rate, bias), dtype or torch.float32)) is not None:
        return reason
    return None if len(bias) <= _WIDEST * log_rate.numel() else f"heads are wider than {_WIDEST}"


def _unsuited(operands: tuple[Tensor, ...], *dtypes: torch.dtype) -> str | None:
    for dtype in (*(operand.dtype for operand in operands), *dtypes):
        if dtype not in DTYPES:
            return f"the kernel does not support {dtype}"
    if any(operand.device != operands[0].device for operand in operands):
        return "the operands are on different devices"
    parameters = operands[1:3]
    return (
        None
        if all(parameter.is_contiguous() for parameter in parameters)
        else "a parameter is not contiguous"
    )
