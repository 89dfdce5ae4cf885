"""RMSNorm in Triton with the scale rounded to the dtype of x, and the scale by itself.

`veomni_hook.kernels.rms_norm.rounded_device` has the formulas.

Saved: x, weight, the scale of each row in float32. Mutates: nothing.
Batch-invariant, as `veomni_hook.kernels.rms_norm.triton`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial

import torch

from veomni_hook.kernels.rms_norm import reference
from veomni_hook.kernels.rms_norm import rounded_device as kernels
from veomni_hook.kernels.rms_norm import triton as plain
from veomni_hook.kernels.rms_norm.tiles import LARGE, NONE, WEIGHT, warps_of
from veomni_hook.kernels.shared.autograd import differentiable
from veomni_hook.kernels.shared.launch import LAUNCHES, Launch, power
from veomni_hook.kernels.shared.operators import operator
from veomni_hook.kernels.shared.rows import Rows, readable

__all__ = ["inverse_rms", "unweighted_rounded_scale", "without_cast"]

_EVERY_STEP, _SCALED, _SCALE_ALONE = range(3)
_TILE = 2048


# Launchers, cached by all Triton specialisations except the number of rows.
@lru_cache(maxsize=LAUNCHES)
def _launch(
    device: torch.device,
    dtypes: tuple[torch.dtype, ...],
    columns: int,
    x_rows: Rows,
    kind: int | None,
    *,
    large: bool,
) -> tuple[Launch, int]:
    """Return the launcher of a kind's forward (None: the scale's backward), and the rows per program."""
    block = power(columns)
    tile = max(block, _TILE)
    function, kinds = (kernels.inverse_backward, ()) if kind is None else (kernels.forward, (kind,))
    constants = columns, block, tile // block, *kinds
    return Launch(function, 4, *constants, num_warps=warps_of(tile)), tile // block


@operator(lambda x, weight, eps, kind: _empty(x, weight, kind))
def _rms_norm_rounded(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, kind: int
) -> tuple[torch.Tensor, torch.Tensor]:
    x, x_rows = readable(x)
    y, scale = _empty(x, weight, kind)
    columns, rows = x.shape[-1], scale.numel()
    if not x.numel():
        return y.fill_(math.nan), scale  # the mean of no values
    if weight is None:
        weight = x  # a placeholder that the kernel does not access
    launch, size = _launch(
        x.device, (x.dtype, weight.dtype, y.dtype), columns, x_rows, kind, large=rows >= LARGE
    )
    launch((-(-rows // size), 1, 1), x, weight, y, scale, rows, *x_rows, float(eps))
    return y, scale


def _empty(x: torch.Tensor, weight: torch.Tensor | None, kind: int) -> tuple[torch.Tensor, torch.Tensor]:
    out = x.dtype if weight is None else torch.promote_types(x.dtype, weight.dtype)
    shape = (*x.shape[:-1], 1) if kind == _SCALE_ALONE else x.shape
    return x.new_empty(shape, dtype=out), x.new_empty(x.shape[:-1], dtype=torch.float32)


@operator(lambda x, scale, ds: x.new_empty(x.shape))
def _rms_norm_inverse_backward(x: torch.Tensor, scale: torch.Tensor, ds: torch.Tensor) -> torch.Tensor:
    x, x_rows = readable(x)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    columns, rows = x.shape[-1], scale.numel()
    if not x.numel():
        return dx
    launch, size = _launch(x.device, (x.dtype, ds.dtype), columns, x_rows, None, large=rows >= LARGE)
    launch((-(-rows // size), 1, 1), x, scale, ds.contiguous(), dx, rows, *x_rows)
    return dx


def _formula(x: torch.Tensor, weight: torch.Tensor | None, eps: float, kind: int) -> torch.Tensor:
    if weight is not None:
        return reference.without_cast(x, weight, eps)
    return (reference.inverse_rms if kind == _SCALE_ALONE else reference.unweighted_rounded_scale)(x, eps)


def _gradients(
    saved: Sequence[object], rest: Sequence[object], wanted: Sequence[bool], dy: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    x, weight, scale = saved
    if rest[1] == _SCALE_ALONE:
        return _rms_norm_inverse_backward(x, scale, dy), None
    factor = NONE if weight is None else WEIGHT
    return plain.rms_norm_backward(x, weight, scale, dy, None, factor, torch.float32, wanted[1])


#: Takes x, weight, eps and a kind.
_norm: Callable[..., torch.Tensor] = differentiable(_rms_norm_rounded, _gradients, _formula, tensors=2)


def without_cast(hidden_states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return ``weight * x * scale``, in the promoted dtype of ``x`` ``[..., hidden]`` and ``weight``."""
    return _norm(hidden_states, weight, eps, _EVERY_STEP)


def _unweighted(kind: int, hidden_states: torch.Tensor, eps: float) -> torch.Tensor:
    return _norm(hidden_states, None, eps, kind)


#: Return ``x * scale``, or the scale ``[..., 1]``, in the dtype of ``hidden_states`` ``[..., hidden]``.
unweighted_rounded_scale = partial(_unweighted, _SCALED)
inverse_rms = partial(_unweighted, _SCALE_ALONE)
