"""A gated product that the projection after it does not have to save for its backward.

``down_proj(activation(gate) * up)`` saves three tensors of the intermediate size: gate and up for their
gradients, and the product for the weight's gradient. The product can be recomputed from the other two, which
its backward reads anyway. So it is returned as a `Product`, which behaves like any tensor except in
``torch.nn.functional.linear``. That call uses a custom operator which saves gate and up, and whose backward
recomputes the product together with their gradients. At 16,384 x 12,288 in bfloat16 this saves 384 MiB per
layer. Modules stay: ``down_proj`` is called, with its hooks and wrappers.

All other operations on a `Product` use the plain tensor and return plain tensors.

A width that is no multiple of 8 is padded for the three products of this projection (`widths`). A layer that
multiplies in another way calls `projection` with its own `Products`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from veomni_hook.kernels.gated_mlp.linear_input import LinearInput, plain, replaceable
from veomni_hook.kernels.gated_mlp.widths import cut, missing, padded
from veomni_hook.kernels.shared.autograd import gradients, is_recorded
from veomni_hook.kernels.shared.held import are_spent, hold_in_checkpoint, saved_by
from veomni_hook.kernels.shared.operand_checks import count_as_plain

__all__ = ["Gradients", "Origin", "Product", "Products", "Rule", "origin_of", "product_of", "projection"]

Tensor = torch.Tensor


class Rule(NamedTuple):
    """What is done with gate and up.

    ``again(gate, up)`` recomputes the product; ``backward(gate, up, dy, spent)`` returns both gradients and
    the product, which may be in the memory of ``dy``, and, if these are ``spent``, of gate and up;
    ``formula(gate, up)`` is its definition, which can be differentiated.
    """

    again: Callable[[Tensor, Tensor], Tensor]
    backward: Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor, Tensor]]
    formula: Callable[[Tensor, Tensor], Tensor]


class Origin(NamedTuple):
    """Where a product comes from. A graph's node keeps the rule alone: tensors are saved, or stay alive."""

    gate: Tensor
    up: Tensor
    rule: Rule


class Gradients(NamedTuple):
    """How an incoming gradient ``dy`` is multiplied: ``of_input(weight)`` and ``of_weight(x)``."""

    of_input: Callable[[Tensor], Tensor]
    of_weight: Callable[[Tensor], Tensor]


class Products(NamedTuple):
    """How a projection multiplies: ``linear(x, weight, bias)``, and ``gradients(dy)`` for its gradients."""

    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    gradients: Callable[[Tensor], Gradients]


def _gradients(dy: Tensor) -> Gradients:
    turned = dy.flatten(0, -2).t()
    return Gradients(partial(torch.matmul, dy), lambda x: turned @ x.flatten(0, -2))


_PLAIN = Products(functional.linear, _gradients)


def product_of(y: Tensor, origin: Origin) -> Tensor:
    """Return ``y``, which requires a gradient, as a `Product`."""
    product = y.as_subclass(Product)
    product._origin, product._written = origin, y._version
    return product


def origin_of(x: Tensor) -> Origin | None:
    """Return what ``x`` is made of if it is an unchanged `Product` and autograd records."""
    if not isinstance(x, Product) or x._version != x._written or not torch.is_grad_enabled():
        return None
    return x._origin


def projection(x: Tensor, weight: Tensor, bias: Tensor | None, products: Products = _PLAIN) -> Tensor | None:
    """Return ``x W^T + bias`` by an operator that saves what ``x`` is made of; None: it cannot."""
    origin = origin_of(x)
    if origin is None or not replaceable(x, weight, bias):
        return None
    handle = hold_in_checkpoint(origin.gate, origin.up, weight, bias)
    operands = (origin.gate, origin.up, weight, bias, plain(x.detach()), origin.rule, products, handle)
    y: Tensor = _GatedLinear.apply(*operands)  # type: ignore[no-untyped-call]
    return y


class Product(LinearInput):
    """A product that knows its `Origin` until something writes into it."""

    _origin: Origin
    _written: int
    linear = staticmethod(projection)


# Kernels may read its memory as usual, such as a norm between the product and its projection.
count_as_plain(Product)


class _GatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        gate: Tensor,
        up: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        product: Tensor,
        rule: Rule,
        products: Products,
        handle: Tensor | None,
    ) -> Tensor:
        if handle is None:
            ctx.save_for_backward(gate, up, weight, bias)
        ctx.node = None if handle is None else handle.grad_fn
        ctx.rule, ctx.products = rule, products
        ctx.columns = columns = missing(product, product.shape[-1])
        return products.linear(padded(product, columns), padded(weight, columns), bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, weight, bias = ctx.saved_tensors if ctx.node is None else saved_by(ctx.node)
        to_gate, to_up, to_weight, to_bias, *_ = wanted = ctx.needs_input_grad
        if is_recorded():
            slopes = gradients(
                lambda gate, up, weight, bias: functional.linear(ctx.rule.formula(gate, up), weight, bias),
                (gate, up, weight, bias), wanted[:4], (dy,),
            )  # fmt: skip
            return *slopes, None, None, None, None
        dgate = dup = dweight = product = None
        columns, products = ctx.columns, ctx.products.gradients(dy)
        if to_gate or to_up:
            dproduct = cut(products.of_input(padded(weight, columns)), columns)
            new = gate.new_empty(0)
            spent = ctx.node is not None and are_spent(new, gate, up)
            dgate, dup, product = ctx.rule.backward(gate, up, dproduct, spent)
        if to_weight:
            product = ctx.rule.again(gate, up) if product is None else product
            dweight = cut(products.of_weight(padded(product, columns)), columns)
        dbias = dy.flatten(0, -2).sum(0) if to_bias else None
        return dgate if to_gate else None, dup if to_up else None, dweight, dbias, None, None, None, None
