"""A decay for each channel in Triton: one launch forward, one backward, and one that adds up the sums.

`veomni_hook.kernels.log_decay.channel_device` has the formulas. Shapes: x ``[batch, positions, heads,
width]`` in float32, bfloat16 or float16, strided; log_rate ``[1, 1, heads, 1]``, bias ``[heads * width]`` in
any of these. Saved: the operands. Mutates: nothing. Deterministic: programs have fixed rows, and there are no
atomics.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from veomni_hook.kernels.log_decay import channel_device as kernels
from veomni_hook.kernels.log_decay import reference
from veomni_hook.kernels.log_decay.rules import fits_channels
from veomni_hook.kernels.log_decay.triton import add_up, forward_programs
from veomni_hook.kernels.shared.autograd import differentiable
from veomni_hook.kernels.shared.launch import LAUNCHES, Launch, cdiv, power, room
from veomni_hook.kernels.shared.operators import operator
from veomni_hook.kernels.shared.rows import Rows, readable

__all__ = ["channels", "channels_rounded_rate", "refuses"]

Tensor = torch.Tensor
_DTYPES = frozenset((torch.float32, torch.bfloat16, torch.float16))
# Columns and rows of a program's tile, columns of a warp (8 of each thread), the widest head, and the
# backward's warps for each multiprocessor: each program of it writes sums of its columns.
_COLUMNS, _ROWS, _WARP, _WIDEST, _WARPS = 1024, 4, 256, 1024, 16


# Cached by all that Triton specialises on.
@lru_cache(maxsize=LAUNCHES)
def _launch(
    device: torch.device,
    dtypes: tuple[torch.dtype, ...],
    sizes: tuple[int, int],
    at: Rows,
    *,
    bounded: bool,
    rounded: bool,
    back: bool,
) -> Launch:
    columns, width = sizes
    block = _block(columns)
    constants = columns, width, block, _ROWS, bounded, rounded
    function, tensors = (kernels.backward, 6) if back else (kernels.forward, 4)
    return Launch(function, tensors, *constants, num_warps=_warps(block))


def _block(columns: int) -> int:
    return min(_COLUMNS, power(columns))


def _warps(block: int) -> int:
    return max(1, block // _WARP)


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
        launch = _launch(
            x.device, dtypes, (columns, width), at, bounded=lower is not None, rounded=rounded, back=False
        )
        rows, across = flat.numel() // columns, cdiv(columns, _block(columns))
        grid = across, forward_programs(cdiv(rows, _ROWS), across, x.device), 1
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
    launch = _launch(
        x.device, dtypes, (columns, width), at, bounded=lower is not None, rounded=rounded, back=True
    )
    block = _block(columns)
    rows, across = flat.numel() // columns, cdiv(columns, block)
    most = _WARPS * room(x.device)[0] // (_warps(block) * across)
    programs = max(1, min(most, cdiv(rows, _ROWS)))
    partial = torch.empty(programs, 2, columns, dtype=torch.float32, device=x.device)
    launch((across, programs, 1), flat, log_rate, bias, dg, dx, partial, rows, _factor(lower), *at)
    return dx, *add_up(partial, log_rate, bias, _factor(lower), rounded=rounded)


def _definition(
    x: Tensor,
    log_rate: Tensor,
    bias: Tensor,
    dtype: torch.dtype,
    lower: float | None,
    rounded: bool,
) -> Tensor:
    formula = reference.channels_rounded_rate if rounded else reference.channels
    return formula(x, log_rate, bias, dtype, lower is not None, lower)


_decay: Callable[..., Tensor] = differentiable(
    _log_decay_channels,
    lambda saved, rest, wanted, dg: _log_decay_channels_backward(*saved, dg, *rest[1:]),
    _definition,
    tensors=3,
)


def channels(
    x: Tensor,
    log_rate: Tensor,
    bias: Tensor,
    dtype: torch.dtype | None,
    bounded: bool,
    lower: float | None,
) -> Tensor:
    """Return the decay of each channel in ``dtype`` (None: float32), shaped as ``x``."""
    if not fits_channels(x, log_rate, bias) or x.dtype not in _DTYPES:
        return reference.channels(x, log_rate, bias, dtype, bounded, lower)
    return _run(x, log_rate, bias, dtype, lower if bounded else None, rounded=False)


def channels_rounded_rate(
    x: Tensor,
    log_rate: Tensor,
    bias: Tensor,
    dtype: torch.dtype | None,
    bounded: bool,
    lower: float | None,
) -> Tensor:
    """Return `channels`, with ``exp(log_rate)`` rounded to the dtype of ``log_rate``."""
    if not fits_channels(x, log_rate, bias) or x.dtype not in _DTYPES:
        return reference.channels_rounded_rate(x, log_rate, bias, dtype, bounded, lower)
    return _run(x, log_rate, bias, dtype, lower if bounded else None, rounded=not _widens(x))


def _widens(x: Tensor) -> bool:
    """Whether autocast lets torch's exponential return float32."""
    return x.is_cuda and torch.is_autocast_enabled("cuda")


def _run(
    x: Tensor,
    log_rate: Tensor,
    bias: Tensor,
    dtype: torch.dtype | None,
    lower: float | None,
    *,
    rounded: bool,
) -> Tensor:
    bound = None if lower is None else float(lower)
    return _decay(x, log_rate, bias, dtype or torch.float32, bound, rounded)


def refuses(owner: Any, x: Any, log_rate: Any, bias: Any, dtype: Any, bounded: Any, lower: Any) -> str | None:
    """Return what the kernels refuse, beside `rules`, or None."""
    for kind in (x.dtype, log_rate.dtype, bias.dtype, dtype or torch.float32):
        if kind not in _DTYPES:
            return f"the kernel does not support {kind}"
    if not x.device == log_rate.device == bias.device:
        return "the operands are on different devices"
    if not (log_rate.is_contiguous() and bias.is_contiguous()):
        return "a parameter is not contiguous"
    return None if len(bias) <= _WIDEST * log_rate.numel() else f"heads are wider than {_WIDEST}"
