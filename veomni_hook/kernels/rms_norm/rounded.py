"""RMSNorm in Triton with the scale rounded to the dtype of x, and the scale by itself.

`veomni_hook.kernels.rms_norm.rounded_device` has the formulas.

Saved: x, weight, the scale of each row in float32. Mutates: nothing.
Batch-invariant, as `veomni_hook.kernels.rms_norm.triton`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from veomni_hook.kernels.rms_norm import reference
from veomni_hook.kernels.rms_norm import rounded_device as kernels
from veomni_hook.kernels.rms_norm import triton as plain
from veomni_hook.kernels.rms_norm.tiles import LARGE, NONE, WEIGHT, warps_of
from veomni_hook.kernels.shared.autograd import gradients, is_recorded
from veomni_hook.kernels.shared.launch import LAUNCHES, Launch, power
from veomni_hook.kernels.shared.operators import define_op
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


def _forward_op(
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


def _forward_fake(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, kind: int
) -> tuple[torch.Tensor, torch.Tensor]:
    return _empty(x, weight, kind)


def _inverse_backward_op(x: torch.Tensor, scale: torch.Tensor, ds: torch.Tensor) -> torch.Tensor:
    x, x_rows = readable(x)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    columns, rows = x.shape[-1], scale.numel()
    if not x.numel():
        return dx
    launch, size = _launch(x.device, (x.dtype, ds.dtype), columns, x_rows, None, large=rows >= LARGE)
    launch((-(-rows // size), 1, 1), x, scale, ds.contiguous(), dx, rows, *x_rows)
    return dx


def _inverse_backward_fake(x: torch.Tensor, scale: torch.Tensor, ds: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape)


_FORWARD = define_op(
    "rms_norm_rounded(Tensor x, Tensor? weight, float eps, int kind) -> (Tensor, Tensor)",
    _forward_op,
    _forward_fake,
)
_INVERSE_BACKWARD = define_op(
    "rms_norm_inverse_backward(Tensor x, Tensor scale, Tensor ds) -> Tensor",
    _inverse_backward_op,
    _inverse_backward_fake,
)


class _RoundedRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, eps: float, kind: int
    ) -> torch.Tensor:
        y, scale = _FORWARD(x, weight, eps, kind)
        ctx.save_for_backward(x, weight, scale)
        ctx.kind, ctx.eps = kind, eps
        return y  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        wanted = to_x, to_weight = ctx.needs_input_grad[:2]
        if is_recorded():
            definition = _definition(ctx.kind, ctx.eps)
            return *gradients(definition, (x, weight), wanted, (dy,)), None, None
        if ctx.kind == _SCALE_ALONE:
            return _INVERSE_BACKWARD(x, scale, dy), None, None, None
        factor = NONE if weight is None else WEIGHT
        dx, dweight = plain.BACKWARD(x, weight, scale, dy, None, factor, torch.float32, to_weight)
        return dx if to_x else None, dweight if to_weight else None, None, None


def _definition(kind: int, eps: float) -> Callable[..., torch.Tensor]:
    if kind == _EVERY_STEP:
        return lambda x, weight: reference.without_cast(x, weight, eps)
    norm = reference.inverse_rms if kind == _SCALE_ALONE else reference.unweighted_rounded_scale
    return lambda x, _: norm(x, eps)


def _norm(*call: Any) -> torch.Tensor:
    return _RoundedRmsNorm.apply(*call)  # type: ignore[no-any-return, no-untyped-call]


def without_cast(hidden_states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return ``weight * x * scale``, in the promoted dtype of ``x`` ``[..., hidden]`` and ``weight``."""
    return _norm(hidden_states, weight, eps, _EVERY_STEP)


def unweighted_rounded_scale(hidden_states: torch.Tensor, eps: float) -> torch.Tensor:
    """Return ``x * scale``, both in the dtype of ``hidden_states`` ``[..., hidden]``."""
    return _norm(hidden_states, None, eps, _SCALED)


def inverse_rms(hidden_states: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the scale ``[..., 1]`` in the dtype of ``hidden_states`` ``[..., hidden]``."""
    return _norm(hidden_states, None, eps, _SCALE_ALONE)
