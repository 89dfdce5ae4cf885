"""Gradients of experts whose stacked weights have low-rank adapters: the autograd code for all backends.

Forward:  z = x[token] U_e + s (x[token] A_e) B_e, and the same for the second product; `torch` has the rest
Backward: dA_e = x[token]' (s dz B_e');  dB_e = (s x[token] A_e)' dz;  dx gets s dz B_e' A_e'
Saved: the operands, the factors, and what the backend's forward returns for backward. A frozen weight gets no
gradient. Second derivatives come from the reference. Mutates: nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from veomni_hook.kernels.moe_experts.by_reference import by_reference
from veomni_hook.kernels.moe_experts.forms import Form, Operands
from veomni_hook.kernels.moe_experts.low_rank import Adapters, Factors
from veomni_hook.kernels.moe_experts.variants import LAYOUTS
from veomni_hook.kernels.shared.autograd import gradients, is_recorded
from veomni_hook.kernels.shared.operand_checks import wants_grad

__all__ = ["AdaptedBackend", "AdaptedGradients", "AdaptedNeeded", "adapted_experts"]

_OPERANDS, _FACTORS = len(Operands._fields), 4


class AdaptedNeeded(NamedTuple):
    """Which gradients to compute; the names are those of `Operands` and `Adapters`."""

    hidden_states: bool
    top_k_weights: bool
    up: bool
    up_bias: bool
    down: bool
    down_bias: bool
    up_into: bool
    up_out: bool
    down_into: bool
    down_out: bool


class AdaptedGradients(NamedTuple):
    """Gradients of what is differentiable; those that are not needed may have any content."""

    hidden_states: Tensor | None
    top_k_weights: Tensor | None
    up: Tensor | None
    up_bias: Tensor | None
    down: Tensor | None
    down_bias: Tensor | None
    up_into: Tensor | None
    up_out: Tensor | None
    down_into: Tensor | None
    down_out: Tensor | None


class AdaptedBackend(NamedTuple):
    """A backend's two functions for weights with adapters, called with autocast off.

    Attributes:
        forward: ``(operands, adapters, form, *, keep) -> (result, kept)``, as in `autograd.Backend`.
        backward: ``(grad, operands, adapters, kept, form, needed) -> AdaptedGradients``.
        spends: as in `autograd.Backend`.
    """

    forward: Callable[..., tuple[Tensor, tuple[Tensor, ...]]]
    backward: Callable[..., AdaptedGradients]
    spends: bool = False


class _Adapted(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, backend: AdaptedBackend, form: Form, scales: tuple[float, float], *tensors: Any
    ) -> Tensor:
        ctx.backend, ctx.form, ctx.scales, ctx.spent = backend, form, scales, False
        operands, adapters = Operands(*tensors[:_OPERANDS]), _adapters(tensors[_OPERANDS:], scales)
        with torch.autocast(operands.hidden_states.device.type, enabled=False):
            result, kept = backend.forward(operands, adapters, form, keep=True)
        ctx.save_for_backward(*tensors, *kept)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved, count = ctx.saved_tensors, _OPERANDS + _FACTORS  # checkpointing provides them only once
        operands, adapters = Operands(*saved[:_OPERANDS]), _adapters(saved[_OPERANDS:count], ctx.scales)
        kept = () if ctx.spent else saved[count:]
        wanted = ctx.needs_input_grad[3:]
        inputs = (operands.hidden_states, *operands[2:], *adapters.factors)
        needed = AdaptedNeeded(wanted[0], *wanted[2:])
        if is_recorded():
            found = _differentiable(ctx.form, operands, adapters, needed, grad)
        else:
            ctx.spent = ctx.backend.spends
            with torch.autocast(grad.device.type, enabled=False):
                found = ctx.backend.backward(grad, operands, adapters, kept, ctx.form, needed)
        first, *others = (
            gradient.to(of.dtype) if want and gradient is not None and of is not None else None
            for gradient, of, want in zip(found, inputs, needed, strict=True)
        )
        return None, None, None, first, None, *others


def adapted_experts(backend: AdaptedBackend, form: Form, operands: Operands, adapters: Adapters) -> Tensor:
    """Compute experts with adapters; ``operands`` hold the weights alone."""
    factors, scales = adapters.factors, (adapters.up_scale, adapters.down_scale)
    if wants_grad(*(each for each in (*operands, *factors) if each is not None)):
        return _Adapted.apply(backend, form, scales, *operands, *factors)  # type: ignore[no-untyped-call,no-any-return]
    with torch.autocast(operands.hidden_states.device.type, enabled=False):
        return backend.forward(operands, adapters, form, keep=False)[0]


def _adapters(factors: tuple[Any, ...], scales: tuple[float, float]) -> Adapters:
    up_into, up_out, down_into, down_out = factors
    return Adapters(up_into, up_out, down_into, down_out, *scales)


def _differentiable(
    form: Form, operands: Operands, adapters: Adapters, needed: AdaptedNeeded, grad: Tensor
) -> AdaptedGradients:
    """Return differentiable gradients, through the sum of weights and adapters."""
    x, index, *others = operands

    def formula(x: Tensor, *tensors: Any) -> Tensor:
        weights = Operands(x, index, *tensors[:-_FACTORS])
        terms = _adapters(tensors[-_FACTORS:], (adapters.up_scale, adapters.down_scale))
        up, down = _sum(weights.up, terms.up, form), _sum(weights.down, terms.down, form)
        return by_reference(weights._replace(up=up, down=down), form)

    return AdaptedGradients(*gradients(formula, (x, *others, *adapters.factors), needed, (grad,)))


def _sum(weight: Tensor, factors: Factors | None, form: Form) -> Tensor:
    if factors is None:
        return weight
    into, out = factors.into.to(form.dtype), factors.out.to(form.dtype)
    with torch.autocast(weight.device.type, enabled=False):
        delta = into.transpose(1, 2) @ out.transpose(1, 2) if LAYOUTS[form.variant].transposed else out @ into
    return weight.to(form.dtype) + factors.scale * delta
