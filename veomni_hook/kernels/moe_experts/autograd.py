"""Gradients of experts with stacked weights: the autograd code for all backends.

Saved: the operands, and what the backend's forward returns for backward (`torch` keeps the first product
``[tokens * k, width]``; activations, rows of tokens and results of experts are recomputed or not needed).
Second derivatives come from the reference. Mutates: nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from veomni_hook.kernels.moe_experts.adapted import AdaptedBackend, adapted_experts
from veomni_hook.kernels.moe_experts.by_reference import by_reference
from veomni_hook.kernels.moe_experts.forms import Form, Operands, form_of, taken_apart
from veomni_hook.kernels.moe_experts.low_rank import adapters_of, is_adapted, without_adapters
from veomni_hook.kernels.moe_experts.variants import LAYOUTS
from veomni_hook.kernels.shared.autograd import gradients, is_recorded
from veomni_hook.kernels.shared.operand_checks import wants_grad

__all__ = ["Backend", "Gradients", "Needed", "experts", "kernel_of"]


class Needed(NamedTuple):
    """Which gradients to compute."""

    hidden_states: bool
    top_k_weights: bool
    up: bool
    up_bias: bool
    down: bool
    down_bias: bool


class Gradients(NamedTuple):
    """Gradients of the differentiable operands; those that are not needed may have any content."""

    hidden_states: Tensor | None
    top_k_weights: Tensor | None
    up: Tensor | None
    up_bias: Tensor | None
    down: Tensor | None
    down_bias: Tensor | None


class Backend(NamedTuple):
    """A backend's two functions, called with autocast off.

    Attributes:
        forward: ``(operands, form, *, keep) -> (result, kept)``: the result ``[tokens, hidden]`` in the dtype
            of the hidden states; ``kept`` is a tuple of tensors for backward, which may be empty unless
            ``keep``.
        backward: ``(grad, operands, kept, form, needed) -> Gradients``, of the operands' shapes, in any
            dtype.
        spends: ``backward`` may overwrite ``kept``, unless it is traced. If called again (retained graph), it
            gets an empty tuple instead.
        adapted: the same for weights with adapters; None if the backend refuses these.
    """

    forward: Callable[..., tuple[Tensor, tuple[Tensor, ...]]]
    backward: Callable[..., Gradients]
    spends: bool = False
    adapted: AdaptedBackend | None = None


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, backend: Backend, form: Form, *tensors: Any) -> Tensor:
        ctx.backend, ctx.form, ctx.spent = backend, form, False
        operands = Operands(*tensors)
        with torch.autocast(operands.hidden_states.device.type, enabled=False):
            result, kept = backend.forward(operands, form, keep=True)
        ctx.save_for_backward(*tensors, *kept)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        count = len(Operands._fields)
        saved = ctx.saved_tensors  # activation checkpointing provides them only once
        operands, kept = Operands(*saved[:count]), () if ctx.spent else saved[count:]
        wanted = ctx.needs_input_grad[2:]
        inputs = (operands.hidden_states, *operands[2:])
        needed = Needed(wanted[0], *wanted[2:])
        if is_recorded():
            found = _differentiable(ctx.form, operands, needed, grad)
        else:
            if ctx.backend.spends and not torch.compiler.is_compiling():
                ctx.spent = True
            with torch.autocast(grad.device.type, enabled=False):
                found = ctx.backend.backward(grad, operands, kept, ctx.form, needed)
        first, *others = (
            gradient.to(of.dtype) if want and gradient is not None and of is not None else None
            for gradient, of, want in zip(found, inputs, needed, strict=True)
        )
        return None, None, first, None, *others


def experts(backend: Backend, variant: str, *operands: Any) -> Tensor:
    """Compute ``variant`` from its reference's operands, which have passed ``forms.refuses``."""
    if backend.adapted is not None and is_adapted(operands):
        return _with_adapters(backend.adapted, variant, operands)
    tensors, rest = taken_apart(operands)
    form = form_of(variant, tensors, rest)
    if wants_grad(*(each for each in tensors if each is not None)):
        return _Experts.apply(backend, form, *tensors)  # type: ignore[no-untyped-call,no-any-return]
    with torch.autocast(tensors.hidden_states.device.type, enabled=False):
        return backend.forward(tensors, form, keep=False)[0]


@cache
def kernel_of(backend: Backend, variant: str) -> Callable[..., Tensor]:
    """Return a backend's kernel for ``variant``."""
    return partial(experts, backend, variant)


def _with_adapters(backend: AdaptedBackend, variant: str, operands: tuple[Any, ...]) -> Tensor:
    tensors, rest = taken_apart(without_adapters(operands))
    down = operands[4 if tensors.up_bias is None else 5]
    adapters = adapters_of(operands[3], down, transposed=LAYOUTS[variant].transposed)
    return adapted_experts(backend, form_of(variant, tensors, rest), tensors, adapters)


def _differentiable(form: Form, operands: Operands, needed: Needed, grad: Tensor) -> Gradients:
    """Return differentiable gradients."""
    x, index, *others = operands

    def formula(x: Tensor, *others: Tensor) -> Tensor:
        return by_reference(Operands(x, index, *others), form)

    return Gradients(*gradients(formula, (x, *others), needed, (grad,)))
