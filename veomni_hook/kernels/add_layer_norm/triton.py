"""A residual addition and LayerNorm in Triton: two reads and two writes forward, three and one backward.

`veomni_hook.kernels.add_layer_norm.device` has the formulas. The backward is LayerNorm's operator
(`veomni_hook.kernels.layer_norm.triton`), which adds the gradient of the sum in float32, so that dx is
rounded once; this one tensor is the gradient of both addends.

Shapes: residual, hidden_states, sum [..., hidden], one dtype; weight, bias [hidden] or None.
Saved: the sum, the weight, the mean and the scale of each row in float32. Mutates: nothing.
Deterministic and batch-invariant, bit for bit.
"""

from __future__ import annotations

from functools import lru_cache, partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import nn

from veomni_hook.kernels.add_layer_norm import device as kernels
from veomni_hook.kernels.add_layer_norm import reference
from veomni_hook.kernels.layer_norm.triton import backward, formula
from veomni_hook.kernels.nn_layer_norm import triton as norms
from veomni_hook.kernels.nn_layer_norm.skipped_calls import refuses_norm
from veomni_hook.kernels.rms_norm.tiles import LARGE, warps_of
from veomni_hook.kernels.shared.autograd import applied, gradients, is_recorded
from veomni_hook.kernels.shared.launch import LAUNCHES, Launch, power
from veomni_hook.kernels.shared.operand_checks import not_plain, untraceable
from veomni_hook.kernels.shared.operators import define_op, on_its_device, watched
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
    keep: bool,  # noqa: FBT001
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


def _forward_op(
    residual: torch.Tensor,
    hidden_states: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    out: torch.dtype,
    keep: bool = True,  # noqa: FBT001, FBT002 - not in the op's schema
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


def _forward_fake(
    residual: torch.Tensor,
    hidden_states: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    out: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shape = residual.shape
    moments = residual.new_empty((2, *shape[:-1]), dtype=torch.float32)
    return residual.new_empty(shape), residual.new_empty(shape, dtype=out), moments


#: The forward without the moments, which only a backward reads; if nothing needs a gradient.
_infer = on_its_device(partial(_forward_op, keep=False))
_FORWARD = define_op(
    "add_layer_norm(Tensor residual, Tensor hidden_states, Tensor? weight, Tensor? bias, float eps,"
    " ScalarType out) -> (Tensor, Tensor, Tensor)",
    _forward_op,
    _forward_fake,
)


class _AddLayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        residual: torch.Tensor,
        hidden_states: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        out: torch.dtype,
    ) -> _Pair:
        total, y, moments = _FORWARD(residual, hidden_states, weight, bias, eps, out)
        ctx.save_for_backward(total, weight, bias, moments)
        ctx.eps, ctx.out = eps, out
        # The last layer's sum, or an unused norm, has no gradient: do not allocate zeros for it.
        ctx.set_materialize_grads(False)
        return total, y

    @staticmethod
    def backward(
        ctx: Any, dtotal: torch.Tensor | None, dy: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        total, weight, bias, moments = ctx.saved_tensors
        to_residual, to_hidden, to_weight, to_bias = ctx.needs_input_grad[:4]
        dx, dweight, dbias = dtotal, None, None
        if is_recorded():
            # The sum has one gradient, whichever addend it is for.
            wanted = to_residual or to_hidden, to_weight, to_bias
            norm = partial(formula, eps=ctx.eps, dtypes=(torch.float32, torch.float32, ctx.out))
            dx, dweight, dbias = gradients(
                lambda x, *rest: (x, norm(x, *rest)), (total, weight, bias), wanted, (dtotal, dy)
            )
        elif dy is not None:
            needed = to_weight, to_bias
            dx, dweight, dbias = backward(total, weight, bias, moments, dy, dtotal, torch.float32, needed)
        return dx if to_residual else None, dx if to_hidden else None, dweight, dbias, None, None


_apply = applied(_AddLayerNorm)


def rounded_once(residual: torch.Tensor, hidden_states: torch.Tensor, norm: nn.LayerNorm) -> _Pair:
    """Return the sum and what ``norm`` makes of it; the reference computes unsupported operands."""
    # The addends may be computed only after the kernel was selected.
    if unfit(residual, hidden_states, norm) is not None:
        return reference.rounded_once(residual, hidden_states, norm)
    weight, bias = norms.parameters(norm)
    out = torch.float32 if norms.cast_by_autocast(residual) else residual.dtype
    if torch.is_grad_enabled() and (
        residual.requires_grad
        or hidden_states.requires_grad
        or (weight is not None and weight.requires_grad)
        or (bias is not None and bias.requires_grad)
    ):
        return _apply(residual, hidden_states, weight, bias, norm.eps, out)  # type: ignore[no-any-return]
    forward = _FORWARD if watched() else _infer
    total, y, _ = forward(residual, hidden_states, weight, bias, norm.eps, out)
    return total, y


def unfit(residual: Any, hidden_states: Any, norm: nn.LayerNorm) -> str | None:
    """Return why the kernels cannot take these operands of a plain norm, or None."""
    reason = not_plain(residual, hidden_states) or untraceable() or _addends_unfit(residual, hidden_states)
    return reason if reason is not None else norms.unfit(residual, norm)


def _addends_unfit(residual: torch.Tensor, hidden_states: torch.Tensor) -> str | None:
    if residual.shape != hidden_states.shape:
        return "the two addends have different shapes"
    if residual.dtype is not hidden_states.dtype:
        return f"the two addends have the dtypes {residual.dtype} and {hidden_states.dtype}"
    if residual.device != hidden_states.device:
        return "the two addends are on different devices"
    if hidden_states.layout is not torch.strided:
        return "the two addends are not strided tensors"
    return None


def refuses(owner: Any, residual: torch.Tensor, hidden_states: torch.Tensor, norm: Any) -> str | None:
    """Return why this call must run the upstream code, or None. Operands: see `skipped_calls.refuses`."""
    reason = refuses_norm(norm)
    return reason if reason is not None else unfit(residual, hidden_states, norm)


def loses(owner: Any, residual: torch.Tensor, hidden_states: torch.Tensor, norm: Any) -> str | None:
    """Return why the addition and torch's operator are faster for this call, or None."""
    return norms.loses(owner, residual, norm)
