"""Defines the two operators, forward and backward, of a backend of experts with stacked weights.

`forms` defines operands and forms; `autograd` calls the operators. Gradients have the dtypes of their
operands; the operators return an empty tensor for a gradient that is not needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from veomni_hook.kernels.moe_experts.autograd import Backend, Gradients, Needed
from veomni_hook.kernels.moe_experts.forms import Form, Operands
from veomni_hook.kernels.shared.operators import operator, watched

__all__ = ["FORM", "OPERANDS", "define_backend", "tensors_of"]

#: Parts of schemas.
FORM = "str variant, str activation, float limit, float alpha, ScalarType dtype"
OPERANDS = (
    "Tensor hidden_states, Tensor top_k_index, Tensor top_k_weights, Tensor up, Tensor? up_bias, Tensor down,"
    " Tensor? down_bias"
)
_TENSORS, _NUMBERS = len(Operands._fields), len(Form._fields)


def define_backend(
    name: str,
    forward: Callable[..., tuple[Tensor, ...]],
    backward: Callable[..., Gradients],
    like_kept: Callable[..., tuple[Tensor, ...]],
    *,
    kept: int = 1,
    spends: bool = False,
) -> Backend:
    """Define the operators ``name`` and ``name_backward`` and return the backend that calls them.

    Args:
        name: the operator's name.
        forward: ``(operands, form, *, keep)`` -> the result and the tensors kept for backward.
        backward: ``(grad, operands, kept, form, needed, *, spend)`` -> the gradients, in any dtype. With
            ``spend`` it may overwrite the kept tensors; if it already did, ``kept`` has None.
        like_kept: ``(operands, form, *, keep)`` -> tensors like those that ``forward`` keeps, any content.
        kept: the number of kept tensors.
        spends: whether ``backward`` uses ``spend``.
    """

    def forward_op(*call: Any) -> tuple[Tensor, ...]:
        return forward(Operands(*call[:_TENSORS]), Form(*call[_TENSORS:-1]), keep=call[-1])

    def forward_fake(*call: Any) -> tuple[Tensor, ...]:
        operands = Operands(*call[:_TENSORS])
        x = operands.hidden_states
        return x.new_empty(x.shape), *like_kept(operands, Form(*call[_TENSORS:-1]), keep=call[-1])

    def backward_op(grad: Tensor, *call: Any) -> tuple[Tensor, ...]:
        *tensors, needed, spend = call
        operands, form = Operands(*tensors[:_TENSORS]), Form(*tensors[-_NUMBERS:])
        found = backward(grad, operands, tensors[_TENSORS:-_NUMBERS], form, Needed(*needed), spend=spend)
        return tuple(
            grad.new_empty(0) if each is None or of is None else each.to(of.dtype)
            for each, of in zip(found, _differentiable(operands), strict=True)
        )

    def backward_fake(grad: Tensor, *call: Any) -> tuple[Tensor, ...]:
        *tensors, needed, _ = call
        return tuple(
            of.new_empty(of.shape) if want and of is not None else grad.new_empty(0)
            for of, want in zip(_differentiable(Operands(*tensors[:_TENSORS])), needed, strict=True)
        )

    given = ", ".join(f"Tensor? kept_{number}" for number in range(kept))
    run = operator(forward_fake, f"{name}({OPERANDS}, {FORM}, bool keep) -> ({tensors_of(1 + kept)})")(
        forward_op
    )
    run_backward = operator(
        backward_fake,
        f"{name}_backward(Tensor grad, {OPERANDS}, {given}, {FORM}, bool[] needed, bool spend)"
        f" -> ({tensors_of(len(Gradients._fields))})",
    )(backward_op)

    def call_forward(operands: Operands, form: Form, *, keep: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
        result, *rest = run(*operands, *form, keep)
        return result, tuple(rest)

    def call_backward(
        grad: Tensor, operands: Operands, held: tuple[Tensor, ...], form: Form, needed: Needed
    ) -> Gradients:
        # Under the dispatcher, nothing may be mutated.
        spend = spends and not watched()
        return Gradients(*run_backward(grad, *operands, *(held or [None] * kept), *form, [*needed], spend))

    return Backend(call_forward, call_backward, spends)


def _differentiable(operands: Operands) -> tuple[Tensor | None, ...]:
    return operands.hidden_states, *operands[2:]


def tensors_of(count: int) -> str:
    """Return the results of an operator that returns a number of tensors, as in a schema."""
    return ", ".join(["Tensor"] * count)
