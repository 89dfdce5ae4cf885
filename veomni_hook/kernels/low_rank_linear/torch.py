"""Linear layers with low-rank terms in PyTorch: every term is added in place.

Forward:  y = x W^T + bias,  h = x A^T,  y += s h B^T
Backward: dh = s dy B,  dB = s dy^T h,  dA = dh^T x,  dx = dy W,  dx += dh A
Shapes: x ``[..., in]``, W ``[out, in]``, A ``[rank, in]``, B ``[out, rank]``, y ``[..., out]``; x, W, y have
one dtype, A and B the same, or float32 beside bfloat16 (`products`).
Saved: x, h, A, B and W by reference, each only if a gradient needs it; a frozen W and bias get no gradient.
Behind a gated product in a checkpoint, h is computed again: the layer need not run for it.
Mutates: nothing of the caller's. Rounded are h, x W^T and y; upstream rounds h B^T and its multiple as well.

This is `_Linear`, for a plain ``nn.Linear`` and an adapter without dropout. `_Added` adds one more term: of
other adapters; of adapters with dropout, whose h is computed as upstream does, with its random numbers; to
the result of layers that have to be called (quantised layers, hooks), which it leaves as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from veomni_hook.kernels.gated_mlp.recomputed import Rule, origin_of
from veomni_hook.kernels.low_rank_linear import reference
from veomni_hook.kernels.low_rank_linear.products import (
    add_product,
    factor_gradient,
    mixes,
    split_factor,
    split_thin,
    summed,
    thin,
)
from veomni_hook.kernels.low_rank_linear.rules import Adapter, autocast_dtype
from veomni_hook.kernels.shared.autograd import applied, gradients, is_recorded
from veomni_hook.kernels.shared.held import are_spent, hold_in_checkpoint, saved_by
from veomni_hook.kernels.shared.module_calls import call_is_seen, is_linear, parameter
from veomni_hook.kernels.shared.operand_checks import not_plain

__all__ = ["linear_with_term", "product_added"]

Tensor = torch.Tensor


class _Linear(torch.autograd.Function):
    """The whole layer; ``x`` is ``[tokens, in]``. With a ``rule``, gate and up get the gradients of x."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        down: Tensor,
        up: Tensor,
        scale: float,
        gate: Tensor | None,
        value: Tensor | None,
        rule: Rule | None,
        handle: Tensor | None,
    ) -> Tensor:
        a, b = split_factor(down, x.dtype), split_factor(up.t(), x.dtype)
        h = split_thin(thin(x, a), x.dtype)
        y = summed(x, weight.t(), bias, h, b, scale)
        to_x, to_weight, _, to_down, to_up, _, to_gate, to_value, *_ = ctx.needs_input_grad
        ctx.to_x = to_x or to_gate or to_value
        ctx.rule, ctx.width = rule, x.shape[1]
        ctx.scale, ctx.split = scale, a.dim() == 3
        ctx.node = None if handle is None else handle.grad_fn
        if handle is not None:
            return y
        ctx.save_for_backward(
            x if rule is None and (to_weight or to_down or to_up) else None,
            weight if ctx.to_x or to_weight else None,
            bias,
            a if ctx.to_x else None,
            b if ctx.to_x or to_down else None,
            h if to_up else None,
            down,
            up,
            gate,
            value,
        )
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, a, b, h, down, up, gate, value = _saved(ctx, dy.dtype)
        to_x, to_weight, to_bias, to_down, to_up, _, to_gate, to_value, *_ = ctx.needs_input_grad
        scale, split = ctx.scale, ctx.split
        if is_recorded():
            return _Linear.recorded(ctx, dy, x, weight, bias, down, up, gate, value)
        dx = dh = dweight = ddown = dup = dgate = dvalue = None
        if ctx.to_x or to_down:
            dh = split_thin(thin(dy, b, scale), dy.dtype)
        if ctx.to_x:
            dx = summed(dy, weight, None, dh, a, 1.0)  # type: ignore[arg-type]
        if ctx.rule is not None:
            if dx is not None:
                new = gate.new_empty(0)
                spent = ctx.node is not None and are_spent(new, gate, value)
                dgate, dvalue, x = ctx.rule.backward(gate, value, dx.view(gate.shape), spent)
                dx = None
            elif to_weight or to_down or h is None:
                x = ctx.rule.again(gate, value)
            x = None if x is None else x.reshape(-1, x.shape[-1])
        if to_weight:
            dweight = dy.t() @ x
        if to_down:
            ddown = factor_gradient(dh, x, 1.0, split=split)  # type: ignore[arg-type]
        if to_up:
            h = split_thin(thin(x, a), dy.dtype) if h is None else h
            dup = factor_gradient(h, dy, scale, split=split, transposed=True)
        return (
            dx if to_x else None,
            dweight,
            dy.sum(0) if to_bias else None,
            ddown,
            dup,
            None,
            dgate if to_gate else None,
            dvalue if to_value else None,
            None,
            None,
        )

    @staticmethod
    def recorded(ctx: Any, dy: Tensor, x: Tensor | None, *others: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return differentiable gradients; ``others`` are weight, bias, down, up, gate and value."""
        wanted = [*ctx.needs_input_grad[:5], *ctx.needs_input_grad[6:8]]
        if x is None and wanted[0]:  # nothing but dx depends on x, and dx does not
            x = dy.new_zeros(dy.shape[0], ctx.width).requires_grad_()

        def formula(x: Any, weight: Any, bias: Any, down: Any, up: Any, gate: Any, value: Any) -> Any:
            if ctx.rule is not None:
                x = ctx.rule.formula(gate, value).reshape(-1, ctx.width)
            wide = x.to(down.dtype)
            term = functional.linear(functional.linear(wide, down), up) * ctx.scale
            # Without a saved weight, neither its gradient nor one through it is wanted.
            y = 0 if weight is None else functional.linear(x, weight)
            return ((y if bias is None else y + bias) + term).to(dy.dtype)

        dx, dweight, dbias, ddown, dup, dgate, dvalue = gradients(formula, (x, *others), wanted, (dy,))
        return dx, dweight, dbias, ddown, dup, None, dgate, dvalue, None, None


def _saved(ctx: Any, dtype: torch.dtype) -> tuple[Any, ...]:
    if ctx.node is None:
        return tuple(ctx.saved_tensors)
    weight, bias, down, up, *products = saved_by(ctx.node)
    a, b = split_factor(down, dtype), split_factor(up.t(), dtype)
    return None, weight, bias, a, b, None, down, up, *products


class _Thin(torch.autograd.Function):
    """``x @ down.T`` in float32, for bfloat16 ``x [tokens, in]`` and float32 ``down``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, down: Tensor) -> Tensor:
        a = split_factor(down, x.dtype)
        to_x, to_down = ctx.needs_input_grad
        ctx.save_for_backward(x if to_down else None, a if to_x else None, down if to_x else None)
        ctx.dtype = x.dtype
        return thin(x, a)

    @staticmethod
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, a, down = ctx.saved_tensors
        if is_recorded():
            dx = None if down is None else (dh @ down).to(ctx.dtype)
            return dx, None if x is None else dh.t() @ x.float()
        dh = split_thin(dh, ctx.dtype)
        dx = None if a is None else dh @ a.view(dh.shape[1], -1)
        return dx, None if x is None else factor_gradient(dh, x, 1.0, split=True)


class _Added(torch.autograd.Function):
    """``y + scale * h @ up.T``, in place if ``ours``: nobody else has ``y [tokens, out]``, or needs it."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, h: Tensor, up: Tensor, scale: float, ours: Any) -> Tensor:
        b = split_factor(up.t(), y.dtype)
        _, to_h, to_up, *_ = ctx.needs_input_grad
        ctx.scale, ctx.split = scale, b.dim() == 3
        thin_one, h = h, split_thin(h, y.dtype)
        ctx.save_for_backward(
            b if to_h else None, h if to_up else None, up if to_h else None, thin_one if to_up else None
        )
        if not ours:
            return torch.addmm(y, h, b.reshape(h.shape[1], -1), alpha=scale)
        ctx.mark_dirty(y)
        return add_product(y, h, b, scale)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        b, h, up, thin_one = ctx.saved_tensors
        if is_recorded():
            dh = None if up is None else dy.to(up.dtype) @ up * ctx.scale
            dup = None if thin_one is None else dy.t().to(thin_one.dtype) @ thin_one * ctx.scale
            return dy if ctx.needs_input_grad[0] else None, dh, dup, None, None
        dh = None if b is None else thin(dy, b, ctx.scale)
        dup = None
        if h is not None:
            dup = factor_gradient(h, dy, ctx.scale, split=ctx.split, transposed=True)
        return dy if ctx.needs_input_grad[0] else None, dh, dup, None, None


_linear, _thin, _added = applied(_Linear), applied(_Thin), applied(_Added)


def linear_with_term(
    x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, scale: float
) -> Tensor:
    """Return ``x W^T + bias + scale * x A^T B^T`` for ``x [tokens, in]``; for dtypes see the module."""
    return _linear(x, weight, bias, down, up, scale, None, None, None, None)  # type: ignore[no-any-return]


def product_added(x: Tensor, linear: nn.Module, adapters: Sequence[Adapter]) -> Tensor:
    """Return ``linear(x)`` plus the terms of ``adapters``, which `refuses` has accepted.

    ``adapters`` are tuples of dropout, down, up, scale and None.
    """
    dtype = autocast_dtype(x)
    weights = _weights(linear, x.dtype if dtype is None else None)
    rest = list(adapters)
    if weights is None:
        y = linear(x)
        if not _fits(y, x if dtype is None else None, adapters):
            return reference.product_added(x, lambda _: y, adapters)
        shape = y.shape
        x, y = _in(x, dtype), _rows(y)
    else:
        shape = (*x.shape[:-1], weights[0].shape[0])
        x = _in(x, dtype)
        weight, bias = (_in(weight, dtype) for weight in weights)
        if _drops(rest[0][0]):
            y = functional.linear(_rows(x), weight, bias)
        else:
            y = _whole(x, weight, bias, rest.pop(0), dtype)
    ours = weights is not None
    for adapter in rest:
        y = _with_term(y, x, adapter, dtype, ours=ours)
        ours = True
    return y.view(shape)


def _whole(
    x: Tensor, weight: Tensor, bias: Tensor | None, adapter: Adapter, dtype: torch.dtype | None
) -> Tensor:
    _, down, up, scale, _ = adapter
    factors = _in(parameter(down, "weight"), dtype), _in(parameter(up, "weight"), dtype)
    origin = origin_of(x)
    if origin is None:
        return linear_with_term(_rows(x), weight, bias, *factors, scale)
    # Saved are the two tensors that the product is made of; they get the gradients.
    product = _rows(x.detach())
    handle = hold_in_checkpoint(weight, bias, *factors, origin.gate, origin.up)
    y: Tensor = _linear(product, weight, bias, *factors, scale, *origin, handle)
    return y


def _with_term(y: Tensor, x: Tensor, adapter: Adapter, dtype: torch.dtype | None, *, ours: bool) -> Tensor:
    dropout, down, up, scale, _ = adapter
    factor = _in(parameter(down, "weight"), dtype)
    if _drops(dropout):
        # The dtype decides about dropout's random numbers.
        h = _rows(functional.linear(dropout(x.to(parameter(down, "weight").dtype)), factor))
    elif mixes(x.dtype, factor.dtype):
        h = _thin(_rows(x), factor)
    else:
        h = functional.linear(_rows(x), factor)
    return _added(y, h, _in(parameter(up, "weight"), dtype), scale, ours)  # type: ignore[no-any-return]


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _drops(dropout: nn.Module) -> bool:
    return type(dropout) is nn.Dropout and dropout.training and dropout.p > 0


def _in(x: Any, dtype: torch.dtype | None) -> Any:
    """Return what autocast makes of an operand of a product."""
    return x if x is None or dtype is None or x.dtype is torch.float64 else x.to(dtype)


def _weights(linear: nn.Module, dtype: torch.dtype | None) -> tuple[Tensor, Tensor | None] | None:
    """Return weight and bias if nobody would notice that the layer is not called; else None."""
    if not is_linear(type(linear)) or call_is_seen(linear) is not None:
        return None
    weight, bias = parameter(linear, "weight"), parameter(linear, "bias")
    if not_plain(weight) is not None or (bias is not None and not_plain(bias) is not None):
        return None
    return None if dtype is not None and weight.dtype is not dtype else (weight, bias)


def _fits(y: Any, x: Tensor | None, adapters: Sequence[Adapter]) -> bool:
    """Return whether terms can be added to the result of a layer that was called."""
    if not isinstance(y, Tensor) or not_plain(y) is not None or not y.ndim:
        return False
    if x is None:  # autocast
        return torch.get_autocast_dtype(y.device.type) is y.dtype
    return y.dtype is x.dtype and y.shape[-1] == parameter(adapters[0][2], "weight").shape[0]
