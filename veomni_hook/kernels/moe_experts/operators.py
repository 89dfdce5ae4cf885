"""What a backend of experts with stacked weights is, and its operators, forward and backward.

`forms` defines operands and forms, `low_rank` adapters; `autograd` calls the operators. Gradients have the
dtypes and shapes of their operands; the operators return an empty tensor for a gradient that is not needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from veomni_hook.kernels.moe_experts.forms import Form, Operands
from veomni_hook.kernels.moe_experts.low_rank import NO_ADAPTERS, Adapters
from veomni_hook.kernels.shared.operators import operator, watched

__all__ = ["Backend", "Gradients", "Needed", "define_backend"]

# Parts of schemas.
_FORM = "str variant, str activation, float limit, float alpha, ScalarType dtype, bool float8, bool mx"
_OPERANDS = (
    "Tensor hidden_states, Tensor top_k_index, Tensor top_k_weights, Tensor up, Tensor? up_bias, Tensor down,"
    " Tensor? down_bias"
)
_ADAPTERS = (
    ", Tensor? up_into, Tensor? up_out, Tensor? down_into, Tensor? down_out, float up_scale, float down_scale"
)
_TENSORS, _NUMBERS = len(Operands._fields), len(Form._fields)


class Needed(NamedTuple):
    """Which gradients to compute; the names are those of `Operands` and `Adapters`."""

    hidden_states: bool
    top_k_weights: bool
    up: bool
    up_bias: bool
    down: bool
    down_bias: bool
    up_into: bool = False
    up_out: bool = False
    down_into: bool = False
    down_out: bool = False


class Gradients(NamedTuple):
    """Gradients of what is differentiable; those that are not needed may have any content."""

    hidden_states: Tensor | None
    top_k_weights: Tensor | None
    up: Tensor | None
    up_bias: Tensor | None
    down: Tensor | None
    down_bias: Tensor | None
    up_into: Tensor | None = None
    up_out: Tensor | None = None
    down_into: Tensor | None = None
    down_out: Tensor | None = None


class Backend(NamedTuple):
    """A backend's two functions, called with autocast off.

    Attributes:
        forward: ``(operands, adapters, form, *, keep) -> (result, kept)``: the result ``[tokens, hidden]`` in
            the dtype of the hidden states; ``kept`` is a tuple of tensors for backward, which may be empty
            unless ``keep``.
        backward: ``(grad, operands, adapters, kept, form, needed) -> Gradients``, of the operands' shapes, in
            any dtype.
        spends: ``backward`` may overwrite ``kept``, unless it is traced. If called again (retained graph), it
            gets an empty tuple instead.
        adapted: the same for weights with adapters; None if the backend refuses these.
    """

    forward: Callable[..., tuple[Tensor, tuple[Tensor, ...]]]
    backward: Callable[..., Gradients]
    spends: bool = False
    adapted: Backend | None = None


def define_backend(
    name: str,
    forward: Callable[..., tuple[Tensor, ...]],
    backward: Callable[..., Gradients],
    like_kept: Callable[..., tuple[Tensor, ...]],
    *,
    kept: int = 1,
    kept_adapted: int | None = None,
    spends: bool = False,
) -> Backend:
    """Define the operators ``name`` and ``name_backward`` and return the backend that calls them.

    Args:
        name: the operator's name; ``name_adapted`` are the operators of calls with adapters.
        forward: ``(operands, adapters, form, *, keep)`` -> the result and the tensors kept for backward.
        backward: ``(grad, operands, adapters, kept, form, needed, *, spend)`` -> the gradients, in any dtype.
            With ``spend`` it may overwrite the kept tensors; if it already did, ``kept`` has None.
        like_kept: ``(operands, adapters, form, *, keep)`` -> tensors like those that ``forward`` keeps.
        kept: the number of kept tensors without adapters, the first ones that ``forward`` returns.
        kept_adapted: the number with adapters; None if the backend takes none.
        spends: whether ``backward`` uses ``spend``.
    """
    functions = forward, backward, like_kept
    plain = _defined(name, *functions, 0, kept, spends=spends)
    if kept_adapted is None:
        return plain
    adapted = _defined(f"{name}_adapted", *functions, len(NO_ADAPTERS), kept_adapted, spends=spends)
    return plain._replace(adapted=adapted)


def _defined(
    name: str,
    forward: Callable[..., tuple[Tensor, ...]],
    backward: Callable[..., Gradients],
    like_kept: Callable[..., tuple[Tensor, ...]],
    fields: int,
    kept: int,
    *,
    spends: bool,
) -> Backend:
    """Define both operators with ``fields`` of `Adapters`: all, or none."""
    ends = _TENSORS + fields

    def parts(call: tuple[Any, ...]) -> tuple[Operands, Adapters]:
        return Operands(*call[:_TENSORS]), Adapters(*call[_TENSORS:ends]) if fields else NO_ADAPTERS

    def differentiable(call: tuple[Any, ...]) -> tuple[Tensor | None, ...]:
        operands, adapters = parts(call)
        return operands.hidden_states, *operands[2:], *(adapters.factors if fields else ())

    count = len(differentiable((None,) * ends))
    operands = _OPERANDS + (_ADAPTERS if fields else "")
    kept_operands = ", ".join(f"Tensor? kept_{number}" for number in range(kept))

    def forward_fake(*call: Any) -> tuple[Tensor, ...]:
        x = call[0]
        like = like_kept(*parts(call), Form(*call[ends:-1]), keep=call[-1])
        return x.new_empty(x.shape), *like[:kept]

    @operator(forward_fake, f"{name}({operands}, {_FORM}, bool keep) -> ({_tensors(1 + kept)})")
    def run(*call: Any) -> tuple[Tensor, ...]:
        return forward(*parts(call), Form(*call[ends:-1]), keep=call[-1])[: 1 + kept]

    def backward_fake(grad: Tensor, *call: Any) -> tuple[Tensor, ...]:
        return tuple(
            of.new_empty(of.shape) if want and of is not None else grad.new_empty(0)
            for of, want in zip(differentiable(call), call[-2], strict=True)
        )

    @operator(
        backward_fake,
        f"{name}_backward(Tensor grad, {operands}, {kept_operands}, {_FORM}, bool[] needed, bool spend)"
        f" -> ({_tensors(count)})",
    )
    def run_backward(grad: Tensor, *call: Any) -> tuple[Tensor, ...]:
        *tensors, wanted, spend = call
        form = Form(*tensors[-_NUMBERS:])
        slopes = backward(grad, *parts(call), tensors[ends:-_NUMBERS], form, Needed(*wanted), spend=spend)
        return tuple(
            slope.to(of.dtype) if want and slope is not None and of is not None else grad.new_empty(0)
            for slope, of, want in zip(slopes, differentiable(call), wanted, strict=False)
        )

    def call_forward(
        operands: Operands, adapters: Adapters, form: Form, *, keep: bool
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        result, *rest = run(*operands, *adapters[:fields], *form, keep)
        return result, tuple(rest)

    def call_backward(
        grad: Tensor,
        operands: Operands,
        adapters: Adapters,
        saved: tuple[Tensor, ...],
        form: Form,
        needed: Needed,
    ) -> Gradients:
        # Under the dispatcher, nothing may be mutated.
        spend = spends and not watched()
        tensors = *operands, *adapters[:fields], *(saved or [None] * kept)
        return Gradients(*run_backward(grad, *tensors, *form, [*needed[:count]], spend))

    return Backend(call_forward, call_backward, spends)


def _tensors(count: int) -> str:
    """Return the results of an operator that returns a number of tensors, as in a schema."""
    return ", ".join(["Tensor"] * count)
