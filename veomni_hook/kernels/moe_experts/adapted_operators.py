"""Defines the two operators, forward and backward, of a backend of experts with low-rank adapters.

`operators` defines those of weights alone; `adapted` calls these. Gradients have the dtypes and shapes of
their operands; the operators return an empty tensor for a gradient that is not needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from veomni_hook.kernels.moe_experts.adapted import AdaptedBackend, AdaptedGradients, AdaptedNeeded
from veomni_hook.kernels.moe_experts.forms import Form, Operands
from veomni_hook.kernels.moe_experts.low_rank import Adapters
from veomni_hook.kernels.moe_experts.operators import FORM, OPERANDS, tensors_of
from veomni_hook.kernels.shared.operators import operator, watched

__all__ = ["define_adapted"]

_ADAPTERS = (
    "Tensor? up_into, Tensor? up_out, Tensor? down_into, Tensor? down_out, float up_scale, float down_scale"
)
_TENSORS, _FACTORS, _NUMBERS = len(Operands._fields), len(Adapters._fields), len(Form._fields)


def define_adapted(
    name: str,
    forward: Callable[..., tuple[Tensor, ...]],
    backward: Callable[..., AdaptedGradients],
    like_kept: Callable[..., tuple[Tensor, ...]],
    *,
    kept: int = 1,
    spends: bool = False,
) -> AdaptedBackend:
    """Define the operators ``name`` and ``name_backward`` and return the backend that calls them.

    Args:
        name: the operator's name.
        forward: ``(operands, adapters, form, *, keep)`` -> the result and the tensors kept for backward.
        backward: ``(grad, operands, adapters, kept, form, needed, *, spend)`` -> the gradients, in any dtype.
            With ``spend`` it may overwrite the kept tensors; if it already did, ``kept`` has None.
        like_kept: ``(operands, adapters, form, *, keep)`` -> tensors like those that ``forward`` keeps.
        kept: the number of kept tensors.
        spends: whether ``backward`` uses ``spend``.
    """

    def forward_op(*call: Any) -> tuple[Tensor, ...]:
        return forward(*_taken(call), Form(*call[-1 - _NUMBERS : -1]), keep=call[-1])

    def forward_fake(*call: Any) -> tuple[Tensor, ...]:
        x = call[0]
        return x.new_empty(x.shape), *like_kept(*_taken(call), Form(*call[-1 - _NUMBERS : -1]), keep=call[-1])

    def backward_op(grad: Tensor, *call: Any) -> tuple[Tensor, ...]:
        *tensors, needed, spend = call
        operands, adapters = _taken(call)
        held = tensors[_TENSORS + _FACTORS : -_NUMBERS]
        form, needed = Form(*tensors[-_NUMBERS:]), AdaptedNeeded(*needed)
        found = backward(grad, operands, adapters, held, form, needed, spend=spend)
        return tuple(
            each.to(of.dtype) if want and each is not None and of is not None else grad.new_empty(0)
            for each, of, want in zip(found, _differentiable(operands, adapters), needed, strict=True)
        )

    def backward_fake(grad: Tensor, *call: Any) -> tuple[Tensor, ...]:
        needed = call[-2]
        return tuple(
            of.new_empty(of.shape) if want and of is not None else grad.new_empty(0)
            for of, want in zip(_differentiable(*_taken(call)), needed, strict=True)
        )

    given = ", ".join(f"Tensor? kept_{number}" for number in range(kept))
    run = operator(
        forward_fake, f"{name}({OPERANDS}, {_ADAPTERS}, {FORM}, bool keep) -> ({tensors_of(1 + kept)})"
    )(forward_op)
    run_backward = operator(
        backward_fake,
        f"{name}_backward(Tensor grad, {OPERANDS}, {_ADAPTERS}, {given}, {FORM}, bool[] needed, bool spend)"
        f" -> ({tensors_of(len(AdaptedGradients._fields))})",
    )(backward_op)

    def call_forward(
        operands: Operands, adapters: Adapters, form: Form, *, keep: bool
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        result, *rest = run(*operands, *adapters, *form, keep)
        return result, tuple(rest)

    def call_backward(
        grad: Tensor,
        operands: Operands,
        adapters: Adapters,
        held: tuple[Tensor, ...],
        form: Form,
        needed: AdaptedNeeded,
    ) -> AdaptedGradients:
        # Under the dispatcher, nothing may be mutated.
        spend = spends and not watched()
        found = run_backward(grad, *operands, *adapters, *(held or [None] * kept), *form, [*needed], spend)
        return AdaptedGradients(*found)

    return AdaptedBackend(call_forward, call_backward, spends)


def _taken(call: tuple[Any, ...]) -> tuple[Operands, Adapters]:
    return Operands(*call[:_TENSORS]), Adapters(*call[_TENSORS : _TENSORS + _FACTORS])


def _differentiable(operands: Operands, adapters: Adapters) -> tuple[Tensor | None, ...]:
    return operands.hidden_states, *operands[2:], *adapters.factors
