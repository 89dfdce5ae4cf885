"""Gradients of what backends compute over chunks of rows: the only autograd code of this op.

The forward computes the loss and its gradients; backward multiplies them by the incoming gradient.
Log-probabilities and entropies save one number per row, and backward recomputes the logits. Saved: the
gradients or those numbers, and x, weight, bias, target. Second derivatives use the plain definition, with
all logits at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from veomni_hook.kernels.linear_cross_entropy import reference
from veomni_hook.kernels.linear_cross_entropy.objective import (
    NOTHING,
    Objective,
    TokenStatistics,
    Transform,
    Wanted,
)
from veomni_hook.kernels.shared.autograd import gradients, is_recorded
from veomni_hook.kernels.shared.operand_checks import wants_grad

__all__ = ["Backend", "Form", "Found", "Gradients", "Needed", "loss_and_statistics", "token_statistics"]

_Tensors = tuple[torch.Tensor | None, ...]


class Form(NamedTuple):
    """The non-tensor fields of an `Objective`, ``accumulate`` as ``in_float32``, and what is wanted."""

    ignore_index: int
    factor: float
    softcap: float | None
    label_smoothing: float
    z_loss: float
    in_float32: bool
    log_probs: bool
    entropy: bool
    predictions: bool

    @classmethod
    def of(cls, objective: Objective, wanted: Wanted) -> Form:
        """Return the form of ``objective`` with the ``wanted`` statistics."""
        return cls(
            objective.ignore_index,
            float(objective.transform.factor),
            None if objective.transform.softcap is None else float(objective.transform.softcap),
            float(objective.label_smoothing),
            float(objective.z_loss),
            objective.accumulate == "float32",
            *wanted,
        )

    @property
    def transform(self) -> Transform:
        """The transform, without upstream's dtype rounding."""
        return Transform(torch.float32, self.factor, None, self.softcap)


class Needed(NamedTuple):
    """Which gradients to compute."""

    x: bool
    weight: bool
    bias: bool


class Gradients(NamedTuple):
    """Gradients of x, weight and bias; None where not needed."""

    x: torch.Tensor | None
    weight: torch.Tensor | None
    bias: torch.Tensor | None


class Found(NamedTuple):
    """A loss, its gradients without the factor ``late`` ([]; None: 1), and statistics."""

    loss: torch.Tensor
    gradients: Gradients
    late: torch.Tensor | None
    statistics: TokenStatistics


class Backend(NamedTuple):
    """A backend's functions on x ``[rows, hidden]``, weight, bias and target ``[rows]``.

    Attributes:
        loss: ``(x, weight, bias, target, num_items, loss_weights, form, kept, needed) -> Found``; ``kept`` is
            the dtype of the original weight and of its gradient, if ``weight`` is a lower-precision copy.
        statistics: ``(x, weight, bias, target, form) -> (TokenStatistics, lse)``.
        gradients: ``(x, weight, bias, target, form, lse, entropy, to_log_probs, to_entropy, kept, needed) ->
            Gradients``.
        scale: multiplies a tensor by a scalar tensor, in place.
    """

    loss: Callable[..., Found]
    statistics: Callable[..., tuple[TokenStatistics, torch.Tensor]]
    gradients: Callable[..., Gradients]
    scale: Callable[[torch.Tensor, torch.Tensor], None]


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        target: torch.Tensor,
        num_items: torch.Tensor | None,
        loss_weights: torch.Tensor | None,
        backend: Backend,
        form: Form,
    ) -> tuple[torch.Tensor | None, ...]:
        ctx.dtype = compute_dtype(x)
        ctx.backend, ctx.form = backend, form
        with torch.autocast(x.device.type, enabled=False):
            loss, gradients, late, statistics = backend.loss(
                *_cast(ctx.dtype, x, weight, bias), target, num_items, loss_weights, form, weight.dtype,
                Needed(*ctx.needs_input_grad[:3]),
            )  # fmt: skip
        ctx.save_for_backward(x, weight, bias, target, num_items, loss_weights, late, *gradients)
        ctx.mark_non_differentiable(*(statistic for statistic in statistics if statistic is not None))
        return loss, *statistics

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *_: torch.Tensor) -> _Tensors:
        x, weight, bias, target, num_items, loss_weights, late, *gradients = ctx.saved_tensors
        if is_recorded():
            objective = Objective(
                ctx.form.ignore_index, num_items, ctx.form.transform, ctx.form.label_smoothing,
                ctx.form.z_loss, loss_weights,
            )  # fmt: skip

            def again(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
                return reference.loss_and_statistics(x, weight, bias, target, objective, NOTHING)[0]

            return *_differentiable(ctx, again, (x, weight, bias), (grad,)), *[None] * 5
        factor = (grad if late is None else grad * late).reshape(())
        in_place = (
            not torch.compiler.is_compiling() and not torch._C._autograd._get_current_graph_task_keep_graph()
        )
        return (
            *(
                None
                if gradient is None
                else _scaled(ctx.backend, gradient, factor, of.dtype, in_place=in_place)
                for gradient, of in zip(gradients, (x, weight, bias), strict=True)
            ),
            *[None] * 5,
        )


class _Statistics(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        target: torch.Tensor,
        backend: Backend,
        form: Form,
    ) -> tuple[torch.Tensor | None, ...]:
        ctx.dtype = compute_dtype(x)
        ctx.backend, ctx.form = backend, form
        ctx.set_materialize_grads(False)
        with torch.autocast(x.device.type, enabled=False):
            statistics, lse = backend.statistics(*_cast(ctx.dtype, x, weight, bias), target, form)
        ctx.save_for_backward(x, weight, bias, target, lse, statistics.entropy)
        if statistics.predictions is not None:
            ctx.mark_non_differentiable(statistics.predictions)
        return tuple(statistics)

    @staticmethod
    def backward(
        ctx: Any, to_log_probs: torch.Tensor | None, to_entropy: torch.Tensor | None, _: object
    ) -> _Tensors:
        x, weight, bias, target, lse, entropy = ctx.saved_tensors
        if is_recorded():
            objective = Objective(ctx.form.ignore_index, transform=ctx.form.transform)
            incoming = tuple(tensor for tensor in (to_log_probs, to_entropy) if tensor is not None)
            wanted = Wanted(to_log_probs is not None, to_entropy is not None)

            def again(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, ...]:
                statistics = reference.token_statistics(x, weight, bias, target, objective, wanted)
                return tuple(tensor for tensor in statistics if tensor is not None)

            return *_differentiable(ctx, again, (x, weight, bias), incoming), *[None] * 3
        with torch.autocast(x.device.type, enabled=False):
            slopes = ctx.backend.gradients(
                *_cast(ctx.dtype, x, weight, bias), target, ctx.form, lse, entropy, to_log_probs, to_entropy,
                weight.dtype, Needed(*ctx.needs_input_grad[:3]),
            )  # fmt: skip
        return (
            *(
                None if gradient is None else gradient.to(of.dtype)
                for gradient, of in zip(slopes, (x, weight, bias), strict=True)
            ),
            *[None] * 3,
        )


def loss_and_statistics(
    backend: Backend,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    objective: Objective,
    wanted: Wanted,
) -> tuple[torch.Tensor, TokenStatistics]:
    """Return the loss ([], float32) and statistics without a gradient, from ``backend``.

    ``x`` is ``[rows, hidden]``, ``weight`` ``[vocab, hidden]``, ``bias`` ``[vocab]``, ``target`` ``[rows]``
    int64. Gradients are computed if autograd records, for tensors that require them.
    """
    form = Form.of(objective, wanted)
    items = on_device(objective.num_items, x.device)
    weights = objective.loss_weights
    weights = None if weights is None else weights.to(x.device, torch.float32)
    if not wants_grad(*(tensor for tensor in (x, weight, bias) if tensor is not None)):
        x, weight, bias = (
            _without_grad(x),
            _without_grad(weight),
            None if bias is None else _without_grad(bias),
        )
    loss, *statistics = _Loss.apply(x, weight, bias, target, items, weights, backend, form)  # type: ignore[no-untyped-call]
    return loss, TokenStatistics(*statistics)


def token_statistics(
    backend: Backend,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    objective: Objective,
    wanted: Wanted,
) -> TokenStatistics:
    """Return statistics of every row, from ``backend``; ``log_probs`` and ``entropy`` have gradients."""
    form = Form.of(objective, wanted)
    return TokenStatistics(*_Statistics.apply(x, weight, bias, target, backend, form))  # type: ignore[no-untyped-call]


def compute_dtype(x: torch.Tensor) -> torch.dtype:
    """Return the dtype in which logits of ``x`` are computed: autocast's, or that of ``x``."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.dtype is not torch.float64:
        return torch.get_autocast_dtype(kind)
    return x.dtype


def on_device(number: torch.Tensor | float | None, device: torch.device) -> torch.Tensor | None:
    """Return a number as a scalar tensor on ``device``, without synchronising."""
    if isinstance(number, torch.Tensor):
        if number.device == device or number.device.type != "cpu" or torch.compiler.is_compiling():
            return number.to(device)
        number = number.item()  # a copy from the CPU synchronises, a fill does not
    return None if number is None else torch.full((), number, device=device)


def _cast(dtype: torch.dtype, *tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    return [None if tensor is None else tensor.to(dtype) for tensor in tensors]


def _without_grad(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach() if tensor.requires_grad else tensor


def _scaled(
    backend: Backend, gradient: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype, *, in_place: bool
) -> torch.Tensor:
    if in_place:
        backend.scale(gradient, factor)
        return gradient.to(dtype)
    return (gradient.to(torch.promote_types(gradient.dtype, torch.float32)) * factor).to(dtype)


def _differentiable(
    ctx: Any, again: Callable[..., object], inputs: tuple[torch.Tensor | None, ...], incoming: tuple[Any, ...]
) -> tuple[torch.Tensor | None, ...]:
    """Return differentiable gradients, from the plain definition."""

    def formula(*tensors: torch.Tensor | None) -> Any:
        return again(*_cast(ctx.dtype, *tensors))

    return gradients(formula, inputs, ctx.needs_input_grad[:3], incoming)
