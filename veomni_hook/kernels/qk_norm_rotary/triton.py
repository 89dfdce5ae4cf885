"""Norm and rotation of queries and keys in Triton: one pass forward, one backward, one launch for both.

`veomni_hook.kernels.qk_norm_rotary.device` has the formulas. Products are rounded to the promoted dtype of
the norm and the tables, as upstream; the backward is in float32 throughout. Only the operands are saved: a
row's scale is recomputed from the row, which backward reads anyway. Gradients may arrive in any layout.
Results have the same strides as upstream's; dq and dk have the memory order
``[batch, length, heads, head_dim]``, which projections take. Deterministic and batch-invariant: there are no
atomics.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import torch

from veomni_hook.kernels.qk_norm_rotary import reference
from veomni_hook.kernels.qk_norm_rotary.plans import (
    MOST_NUMBERS,
    Dtypes,
    Form,
    Launched,
    Shapes,
    Strides,
    backward_plan,
    forward_plan,
    positions_first,
    readable,
    result,
    stand_in,
)
from veomni_hook.kernels.qk_norm_rotary.variants import OP
from veomni_hook.kernels.rms_norm.tiles import summed
from veomni_hook.kernels.shared.autograd import applied, gradients, is_recorded
from veomni_hook.kernels.shared.launch import LAUNCHES, power
from veomni_hook.kernels.shared.module_calls import parameter
from veomni_hook.kernels.shared.operand_checks import DTYPES, not_plain
from veomni_hook.kernels.shared.operators import on_its_device, operator, watched

__all__ = ["kernel", "refuses"]

Tensor = torch.Tensor
_WEIGHT, _ONE_PLUS = 1, 2  # the factors, as `rms_norm.device.load_factor` numbers them


@operator(
    lambda q, k, *others: (
        result(q, others[-2], joined=others[-1]),
        result(k, others[-2], joined=others[-1]),
    )
)
def _qk_norm_rotary(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_eps: float,
    k_eps: float,
    factor: int,
    middle: torch.dtype,
    normed: torch.dtype,
    product: torch.dtype,
    out: torch.dtype,
    joined: bool,
) -> tuple[Tensor, Tensor]:
    q, k = readable(q), readable(k)
    plan = forward_plan(
        q.device, (q.dtype, q_weight.dtype, cos.dtype, out), (q.shape, k.shape, cos.shape),
        (q.stride(), k.stride(), cos.stride(), sin.stride()), (factor, middle, normed, product), joined,
    )  # fmt: skip
    return _launched(q, k, q_weight, k_weight, cos, sin, q_eps, k_eps, plan, out)


def _launched(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_eps: float,
    k_eps: float,
    plan: Launched,
    out: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """The forward of operands for which the plan was made."""
    q_out = torch.empty_strided(*plan.results[0], dtype=out, device=q.device)
    k_out = torch.empty_strided(*plan.results[1], dtype=out, device=q.device)
    if plan.launch is not None:
        plan.launch(
            plan.grid, q, k, q_weight, k_weight, cos, sin, q_out, k_out,
            float(q_eps), float(k_eps), *plan.numbers,
        )  # fmt: skip
    return q_out, k_out


@operator(
    lambda q, k, q_weight, *others: (
        positions_first(q, q.dtype),
        positions_first(k, k.dtype),
        q_weight.new_empty((2, q.shape[3])),
    )
)
def _qk_norm_rotary_backward(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_grad: Tensor,
    k_grad: Tensor,
    q_eps: float,
    k_eps: float,
    factor: int,
    middle: torch.dtype,
    to_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, q_grad, k_grad = map(readable, (q, k, q_grad, k_grad))
    plan = backward_plan(
        q.device, (q.dtype, q_weight.dtype, cos.dtype, q_grad.dtype), (q.shape, k.shape, cos.shape),
        (q.stride(), k.stride(), cos.stride(), sin.stride(), q_grad.stride(), k_grad.stride()),
        (factor, middle), to_weight,
    )  # fmt: skip
    dq = torch.empty_strided(*plan.results[0], dtype=q.dtype, device=q.device)
    dk = torch.empty_strided(*plan.results[1], dtype=k.dtype, device=q.device)
    columns = q.shape[3]
    programs = plan.grid[0]
    if plan.launch is None or not to_weight:
        weights = torch.zeros(2, columns, dtype=q_weight.dtype, device=q.device)
        partial = weights  # a placeholder that the kernel does not access
    else:
        partial = torch.empty_strided(
            (programs, 2 * columns), (2 * columns, 1), dtype=torch.float32, device=q.device
        )
    if plan.launch is not None:
        plan.launch(
            plan.grid, q, k, q_weight, k_weight, cos, sin, q_grad, k_grad, dq, dk, partial,
            float(q_eps), float(k_eps), *plan.numbers,
        )  # fmt: skip
        if to_weight:
            weights = summed(partial, q_weight.dtype).view(2, columns)
    return dq, dk, weights


#: The forward, if no dispatcher has to know of it.
_launch = on_its_device(_launched)


class _QkNormRotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, variant: str, plan: Launched | None, *operands: Any) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*operands[:6])
        ctx.form, ctx.variant = operands[6:10], variant
        if plan is None:
            return _qk_norm_rotary(*operands)
        return _launch(*operands[:8], plan, operands[12])  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor | None) -> tuple[Tensor | None, ...]:
        # Read once: a checkpoint recomputes them for one reading.
        operands = ctx.saved_tensors
        # Unused results have no gradient, and their inputs get none.
        used = [grad is not None for grad in incoming]
        needs = [need and use for need, use in zip(ctx.needs_input_grad[2:6], used * 2, strict=True)]
        if is_recorded():
            q_eps, k_eps, *_ = ctx.form
            formula = reference.of(ctx.variant)

            def definition(*tensors: Tensor) -> tuple[Tensor, Tensor]:
                return formula(*tensors[:4], q_eps, k_eps, *tensors[4:])

            slopes = gradients(definition, operands, [*needs, False, False], incoming)
            return None, None, *slopes[:4], *[None] * 10
        grads = (
            torch.zeros_like(x) if grad is None else grad
            for x, grad in zip(operands[:2], incoming, strict=True)
        )
        dq, dk, weights = _qk_norm_rotary_backward(*operands, *grads, *ctx.form, needs[2] or needs[3])
        return (
            None,
            None,
            dq if needs[0] else None,
            dk if needs[1] else None,
            weights[0] if needs[2] else None,
            weights[1] if needs[3] else None,
            *[None] * 10,
        )


_apply = applied(_QkNormRotary, data=2)


class _Kernel:
    """The kernel of one variant; unsupported operands are computed by the reference."""

    def __init__(self, variant: str) -> None:
        norm, rotation = OP.variants[variant].form
        self._variant, self._formula = variant, reference.of(variant)
        self._factor = _ONE_PLUS if norm == "one_plus_weight" else _WEIGHT
        self._cast_first = norm == "cast_before_weight"
        self._cast_out = rotation == "half_split_cast_out"
        self._joined = rotation == "half_split_partial"

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        q_weight: Tensor,
        k_weight: Tensor,
        q_eps: float,
        k_eps: float,
        cos: Tensor,
        sin: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return normalised, rotated ``q`` and ``k`` ``[batch, heads, length, head_dim]``, of any strides.

        Weights are ``[head_dim]``, ``cos`` and ``sin`` ``[batch or 1, length, width]``, in any float dtypes.
        Results have the same dtypes as the formula's. Nothing is mutated.
        """
        needed = q.requires_grad or k.requires_grad or q_weight.requires_grad or k_weight.requires_grad
        needed = needed and torch.is_grad_enabled()
        if type(q_eps) is float and type(k_eps) is float and not watched():
            # Every attribute is read once. What was computed from the same ones before fits, too.
            ready = None if not_plain(q, k, q_weight, k_weight, cos, sin) else _ready(
                self,
                (q.device, k.device, q_weight.device, k_weight.device, cos.device, sin.device),
                (q.dtype, k.dtype, q_weight.dtype, k_weight.dtype, cos.dtype, sin.dtype),
                (q.shape, k.shape, q_weight.shape, k_weight.shape, cos.shape, sin.shape),
                (q.stride(), k.stride(), q_weight.stride(), k_weight.stride(), cos.stride(), sin.stride()),
                cos.requires_grad or sin.requires_grad,
            )  # fmt: skip
            if ready is not None:
                operands = q, k, q_weight, k_weight, cos, sin, q_eps, k_eps
                plan, form = ready
                if needed:
                    return _apply(self._variant, plan, *operands, *form)  # type: ignore[no-any-return]
                return _launch(*operands, plan, form[4])  # type: ignore[no-any-return]
        numbers = isinstance(q_eps, (float, int)) and isinstance(k_eps, (float, int))
        if not numbers or self.unsuited(q, k, q_weight, k_weight, cos, sin):
            return self._formula(q, k, q_weight, k_weight, q_eps, k_eps, cos, sin)
        operands = q, k, q_weight, k_weight, cos, sin, q_eps, k_eps
        form = self.form(q.dtype, q_weight.dtype, cos.dtype)
        if needed:
            return _apply(self._variant, None, *operands, *form)  # type: ignore[no-any-return]
        return _qk_norm_rotary(*operands, *form)

    def form(self, q: torch.dtype, weight: torch.dtype, table: torch.dtype) -> Form:
        """Return what follows eps in the operator, for operands of these dtypes."""
        middle, normed = torch.float32, q
        if self._cast_first:
            middle, normed = q, torch.promote_types(q, weight)
        product = torch.promote_types(normed, table)
        out = normed if self._cast_out else product
        return self._factor, middle, normed, product, out, self._joined

    def unsuited(
        self, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor
    ) -> bool:
        """Return whether only the formula can compute these operands."""
        if not_plain(q, k, q_weight, k_weight, cos, sin) or not q.ndim == k.ndim == 4 or cos.ndim != 3:
            return True
        batch, heads, length, columns = q.shape
        tables, positions, width = cos.shape
        return not (
            q.dtype is k.dtype
            and q_weight.dtype is k_weight.dtype
            and cos.dtype is sin.dtype
            and DTYPES.issuperset((q.dtype, q_weight.dtype, cos.dtype))
            and q.device == k.device == q_weight.device == k_weight.device == cos.device == sin.device
            and k.shape == (batch, k.shape[1], length, columns)
            and q_weight.shape == k_weight.shape == (columns,)
            and q_weight.is_contiguous()
            and k_weight.is_contiguous()
            and cos.shape == sin.shape
            and tables in (1, batch)
            and positions == length
            and (width == columns or (self._joined and 0 < width < columns))
            and width % 2 == 0
            and cos.stride(2) == sin.stride(2) == 1
            and not (cos.requires_grad or sin.requires_grad)
            and max(heads, k.shape[1]) * power(columns) <= MOST_NUMBERS
        )


@lru_cache(maxsize=LAUNCHES)
def _ready(
    kernel: _Kernel,
    devices: tuple[torch.device, ...],
    dtypes: Dtypes,
    shapes: Shapes,
    strides: Strides,
    learned: bool,
) -> tuple[Launched, Form] | None:
    """Return the forward's plan and form; None if the operands need a copy or are unsuited.

    Args:
        kernel: the variant's.
        devices: of q, k, both weights, cos and sin, as in all arguments that follow.
        dtypes: theirs.
        shapes: theirs.
        strides: theirs.
        learned: whether cos or sin requires a gradient.
    """
    if learned or len(set(devices)) > 1 or any(stride[-1:] != (1,) for stride in strides):
        return None
    q, k, q_weight, k_weight, cos, sin = map(stand_in, shapes, strides, dtypes)
    if kernel.unsuited(q, k, q_weight, k_weight, cos, sin):
        return None
    factor, *rounded, out, joined = form = kernel.form(q.dtype, q_weight.dtype, cos.dtype)
    middle, normed, product = rounded
    plan = forward_plan(
        devices[0], (q.dtype, q_weight.dtype, cos.dtype, out), (q.shape, k.shape, cos.shape),
        (q.stride(), k.stride(), cos.stride(), sin.stride()), (factor, middle, normed, product), joined,
    )  # fmt: skip
    return plan, form


#: Returns the kernel of a variant.
kernel = cache(_Kernel)


def refuses(owner: object, *operands: Any) -> str | None:
    """Return why this call must run the upstream code, or None; `upstream` documents the operands."""
    hidden_states, q_norm, k_norm, _, _, tables = operands
    weights = parameter(q_norm, "weight"), parameter(k_norm, "weight")
    reason = not_plain(*weights)
    if reason is not None:
        return reason
    first, second = weights
    device = hidden_states.device
    if (
        tables
        and hidden_states.dtype in DTYPES
        and first.dtype in DTYPES
        and second.dtype in DTYPES
        and tables[0].dtype in DTYPES
        and tables[1].dtype in DTYPES
        and first.device == device
        and second.device == device
    ):
        return None
    for operand in (hidden_states, *weights, *(tables or ())):
        if operand.dtype not in DTYPES:
            return f"an operand has dtype {operand.dtype}"
    for weight in weights:
        if weight.device != device:
            return f"the weight of a norm is on {weight.device}, the input on {device}"
    return None
