"""A residual addition and LayerNorm in Triton: two reads and two writes forward, three and one backward.

`veomni_hook.kernels.add_layer_norm.device` has the formulas. The backward is LayerNorm's operator
(`veomni_hook.kernels.layer_norm.triton`), which adds the gradient of the sum in float32, so that dx is
rounded once; this one tensor is the gradient of both addends.

Shapes: residual, hidden_states, sum [..., hidden], one dtype; weight, bias [hidden] or None.
Saved: the sum, the weight, the mean and the scale of each row in float32. Mutates: nothing.
Deterministic and batch-invariant, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import nn

from veomni_hook.kernels.add_layer_norm import device as kernels
from veomni_hook.kernels.add_layer_norm import reference
from veomni_hook.kernels.layer_norm.triton import backward, formula
from veomni_hook.kernels.nn_layer_norm import triton as norms
from veomni_hook.kernels.rms_norm.tiles import LARGE, warps_of
from veomni_hook.kernels.shared.autograd import differentiable
from veomni_hook.kernels.shared.launch import LAUNCHES, Launch, power
from veomni_hook.kernels.shared.operand_checks import not_plain, unfit_addends, untraceable
from veomni_hook.kernels.shared.operators import operator
from veomni_hook.kernels.shared.rows import contiguous_strides, rows_at

__all__ = ["loses", "refuses", "rounded_once"]

_Pair = tuple[torch.Tensor, torch.Tensor]

# Elements per program, as in the addition and RMSNorm.
_FORWARD_TILE, _FORWARD_WIDE_TILE = 2048, 8192
_WIDE = 4096


class _Plan(NamedTuple):
    """What a forward needs to know of the shapes and strides of a call.

    ``launch`` is None if there is nothing to compute. ``numbers`` are the arguments after the tensors up to
    eps, ``moments`` the sizes and strides of the moments. ``like``: the sum has the strides of the residual;
    ``out_like``: and the norm also its dtype.
    """

    launch: Launch | None
    grid: tuple[int, int, int]
    numbers: tuple[int, ...]
    moments: tuple[tuple[int, ...], tuple[int, ...]]
    like: bool
    out_like: bool


@lru_cache(maxsize=LAUNCHES)
def _forward_plan(
    device: torch.device,
    dtypes: tuple[torch.dtype | None, ...],
    shape: torch.Size,
    strides: tuple[tuple[int, ...], tuple[int, ...]],
    keep: bool,
) -> _Plan | None:
    """Return the plan for addends of these strides, or None if one must be copied first.

    ``dtypes`` are those of the sum, the weight, the bias (None if there is none) and the norm.
    """
    residual_rows, hidden_rows = (rows_at(shape, each) for each in strides)
    if residual_rows is None or hidden_rows is None:
        return None
    columns, rows = shape[-1], prod(shape[:-1])
    sizes = (2, *shape[:-1])
    moments = sizes, contiguous_strides(sizes)
    like = strides[0] == contiguous_strides(shape)
    out_like = like and dtypes[3] is dtypes[0]
    if not columns or not rows:
        return _Plan(None, (0, 0, 0), (), moments, like, out_like)
    numbers = rows, *residual_rows, *hidden_rows
    launch, size = _forward_launch(device, dtypes, columns, numbers[1:], large=rows >= LARGE, keep=keep)
    return _Plan(launch, (-(-rows // size), 1, 1), numbers, moments, like, out_like)


# Cached by all Triton specialisations except the number of rows.
@lru_cache(maxsize=LAUNCHES)
def _forward_launch(
    device: torch.device,
    dtypes: tuple[torch.dtype | None, ...],
    columns: int,
    where: tuple[int, ...],
    *,
    large: bool,
    keep: bool,
) -> tuple[Launch, int]:
    """Return the forward's launcher, and the rows per program."""
    block = power(columns)
    tile = max(block, _FORWARD_WIDE_TILE if columns == block >= _WIDE else _FORWARD_TILE)
    constants = columns, block, tile // block, int(dtypes[1] is not None), int(dtypes[2] is not None), keep
    return Launch(kernels.forward, 7, *constants, num_warps=warps_of(tile)), tile // block


@operator(
    lambda residual, hidden_states, weight, bias, eps, out: (
        residual.new_empty(residual.shape),
        residual.new_empty(residual.shape, dtype=out),
        residual.new_empty((2, *residual.shape[:-1]), dtype=torch.float32),
    )
)
def _add_layer_norm(
    residual: torch.Tensor,
    hidden_states: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    out: torch.dtype,
    keep: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    device, shape, dtype = residual.device, residual.shape, residual.dtype
    # The kernel does not access the placeholders of absent parameters.
    factor, factor_dtype = (residual, None) if weight is None else (weight, weight.dtype)
    addend, addend_dtype = (residual, None) if bias is None else (bias, bias.dtype)
    kind = device, (dtype, factor_dtype, addend_dtype, out), shape
    plan = _forward_plan(*kind, (residual.stride(), hidden_states.stride()), keep)
    if plan is None:
        residual, hidden_states = residual.contiguous(), hidden_states.contiguous()
        plan = _forward_plan(*kind, (residual.stride(), hidden_states.stride()), keep)
        assert plan is not None  # noqa: S101
    launch, grid, numbers, sizes, like, out_like = plan
    total = torch.empty_like(residual) if like else torch.empty(shape, dtype=dtype, device=device)
    y = torch.empty_like(residual) if out_like else torch.empty(shape, dtype=out, device=device)
    moments = torch.empty_strided(*sizes, dtype=torch.float32, device=device) if keep else y
    if launch is not None:
        launch(grid, residual, hidden_states, factor, addend, total, y, moments, *numbers, float(eps))
    return total, y, moments


def _formula(
    total: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    out: torch.dtype,
) -> _Pair:
    return total, formula(total, weight, bias, eps, torch.float32, torch.float32, out)


def _gradients(
    saved: Sequence[Any],
    rest: Sequence[Any],
    wanted: Sequence[bool],
    dtotal: torch.Tensor | None,
    dy: torch.Tensor | None,
) -> tuple[torch.Tensor | None, ...]:
    return (dtotal, None, None) if dy is None else backward(saved, dy, dtotal, torch.float32, wanted[1:])


#: Takes the addends, the weight, the bias, eps and the dtype of the norm.
_apply: Callable[..., _Pair] = differentiable(
    _add_layer_norm,
    _gradients,
    _formula,
    tensors=4,
    results=2,
    addends=2,
    # The last layer's sum, or an unused norm, has no gradient: do not allocate zeros for it.
    sparse=True,
    direct={"keep": False},
)


def rounded_once(residual: torch.Tensor, hidden_states: torch.Tensor, norm: nn.LayerNorm) -> _Pair:
    """Return the sum and what ``norm`` makes of it; the reference computes unsupported operands."""
    # The addends may be computed only after the kernel was selected.
    if unfit(residual, hidden_states, norm) is not None:
        return reference.rounded_once(residual, hidden_states, norm)
    weight, bias = norms.parameters(norm)
    out = torch.float32 if norms.cast_by_autocast(residual) else residual.dtype
    return _apply(residual, hidden_states, weight, bias, norm.eps, out)


def unfit(residual: Any, hidden_states: Any, norm: nn.LayerNorm) -> str | None:
    """Return why the kernels cannot take these operands of a plain norm, or None."""
    reason = not_plain(residual, hidden_states) or untraceable() or unfit_addends(residual, hidden_states)
    return reason if reason is not None else norms.unfit(residual, norm)


def refuses(owner: Any, residual: torch.Tensor, hidden_states: torch.Tensor, norm: Any) -> str | None:
    """Return what the kernel refuses, beside `skipped_calls`, or None."""
    return unfit_addends(residual, hidden_states) or norms.unfit(residual, norm)


def loses(owner: Any, residual: torch.Tensor, hidden_states: torch.Tensor, norm: Any) -> str | None:
    """Return why the addition and torch's operator are faster for this call, or None."""
    return norms.loses(owner, residual, norm)
