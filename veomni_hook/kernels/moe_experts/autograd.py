"""Gradients of experts with stacked weights, with or without low-rank adapters, for all backends.

Forward:  z = x[token] U_e + s (x[token] A_e) B_e, and the same for the second product; `torch` has the rest
Backward: dA_e = x[token]' (s dz B_e');  dB_e = (s x[token] A_e)' dz;  dx gets s dz B_e' A_e'
Saved: the operands, the adapters' factors, and what the backend's forward returns for backward (`torch`
keeps the first product ``[tokens * k, width]``; activations, rows of tokens and results of experts are
recomputed or not needed). Second derivatives come from the reference. Mutates: nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from veomni_hook.kernels.moe_experts import reference
from veomni_hook.kernels.moe_experts.forms import Form, Operands, form_of, taken_apart
from veomni_hook.kernels.moe_experts.low_rank import (
    NO_ADAPTERS,
    Adapters,
    Factors,
    adapters_of,
    is_adapted,
    without_adapters,
)
from veomni_hook.kernels.moe_experts.operators import Backend, Gradients, Needed
from veomni_hook.kernels.moe_experts.tiles import tiled
from veomni_hook.kernels.moe_experts.variants import LAYOUTS
from veomni_hook.kernels.shared.activations import FUNCTIONS
from veomni_hook.kernels.shared.autograd import gradients, is_recorded
from veomni_hook.kernels.shared.held import hold, hold_in_checkpoint, saved_by
from veomni_hook.kernels.shared.operand_checks import wants_grad

__all__ = ["experts", "kernel_of"]

_OPERANDS, _FACTORS = len(Operands._fields), len(NO_ADAPTERS.factors)


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        backend: Backend,
        form: Form,
        scales: tuple[float, float],
        handle: Tensor | None,
        *tensors: Any,
    ) -> Tensor:
        ctx.backend, ctx.form, ctx.scales, ctx.spent = backend, form, scales, handle is not None
        operands, adapters = _parts(tensors, scales)
        with torch.autocast(operands.hidden_states.device.type, enabled=False):
            result, kept = backend.forward(operands, adapters, form, keep=handle is None)
        ctx.node = None if handle is None else handle.grad_fn
        if handle is None:
            ctx.save_for_backward(*tensors, *kept)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # Activation checkpointing provides them once.
        saved, count = ctx.saved_tensors if ctx.node is None else saved_by(ctx.node), _OPERANDS + _FACTORS
        operands, adapters = _parts(saved[:count], ctx.scales)
        kept = () if ctx.spent else saved[count:]
        to_x, _, *others = ctx.needs_input_grad[4:]
        inputs = (operands.hidden_states, *operands[2:], *adapters.factors)
        needed = Needed(to_x, *others)
        if is_recorded():
            slopes = _differentiable(ctx.form, operands, adapters, needed, grad)
        else:
            if ctx.backend.spends and not torch.compiler.is_compiling():
                ctx.spent = True
            with torch.autocast(grad.device.type, enabled=False):
                slopes = ctx.backend.backward(grad, operands, adapters, kept, ctx.form, needed)
        first, *rest = (
            gradient.to(of.dtype) if want and gradient is not None and of is not None else None
            for gradient, of, want in zip(slopes, inputs, needed, strict=True)
        )
        return None, None, None, None, first, None, *rest


def _parts(tensors: tuple[Any, ...], scales: tuple[float, float]) -> tuple[Operands, Adapters]:
    up_into, up_out, down_into, down_out = tensors[_OPERANDS:]
    return Operands(*tensors[:_OPERANDS]), Adapters(up_into, up_out, down_into, down_out, *scales)


def experts(backend: Backend, variant: str, *operands: Any, float8: bool = False, mx: bool = False) -> Tensor:
    """Compute ``variant`` from its reference's operands, which have passed ``forms.refuses``.

    ``float8``, ``mx``: see `Form`.
    """
    adapters = NO_ADAPTERS
    if backend.adapted is not None and is_adapted(operands):
        backend, adapted = backend.adapted, operands
        operands = (*without_adapters(operands),)
        down = adapted[4 if taken_apart(operands)[0].up_bias is None else 5]
        adapters = adapters_of(adapted[3], down, transposed=LAYOUTS[variant].transposed)
    tensors, rest = taken_apart(operands)
    form, factors = form_of(variant, tensors, rest)._replace(float8=float8, mx=mx), adapters.factors
    if wants_grad(*(x for x in (*tensors, *factors) if x is not None)):
        scales = adapters.up_scale, adapters.down_scale
        # What a backend can compute again, a checkpoint's recomputation of the layer need not compute.
        tiles = tiled(backend, tensors)
        held = hold_in_checkpoint if tiles is backend else hold
        handle = held(*tensors, *factors) if backend.spends else None
        return _Experts.apply(tiles, form, scales, handle, *tensors, *factors)  # type: ignore[no-untyped-call,no-any-return]
    with torch.autocast(tensors.hidden_states.device.type, enabled=False):
        return backend.forward(tensors, adapters, form, keep=False)[0]


@cache
def kernel_of(
    backend: Backend, variant: str, *, float8: bool = False, mx: bool = False
) -> Callable[..., Tensor]:
    """Return a backend's kernel for ``variant``."""
    return partial(experts, backend, variant, float8=float8, mx=mx)


def _differentiable(
    form: Form, operands: Operands, adapters: Adapters, needed: Needed, grad: Tensor
) -> Gradients:
    """Return differentiable gradients, from the reference and the sums of weights and adapters."""
    x, index, *others = operands
    known = {"act_fn": FUNCTIONS[form.activation], "alpha": form.alpha, "limit": form.limit}
    rest = [known[name] for name in LAYOUTS[form.variant].rest]

    def formula(x: Tensor, *tensors: Any) -> Tensor:
        of_call, terms = _parts((x, index, *tensors), (adapters.up_scale, adapters.down_scale))
        up, down = _sum(of_call.up, terms.up, form), _sum(of_call.down, terms.down, form)
        _, _, weights, *stacked = of_call._replace(up=up, down=down)
        cast = [weight.to(form.dtype) for weight in stacked if weight is not None]
        with torch.autocast(x.device.type, enabled=False):
            result: Tensor = reference.of(form.variant)(x.to(form.dtype), index, weights, *cast, *rest)
        return result.to(x.dtype)

    return Gradients(*gradients(formula, (x, *others, *adapters.factors), needed, (grad,)))


def _sum(weight: Tensor, factors: Factors | None, form: Form) -> Tensor:
    if factors is None:
        return weight
    into, out = factors.into.to(form.dtype), factors.out.to(form.dtype)
    with torch.autocast(weight.device.type, enabled=False):
        delta = into.transpose(1, 2) @ out.transpose(1, 2) if LAYOUTS[form.variant].transposed else out @ into
    return weight.to(form.dtype) + factors.scale * delta
