"""Gradients of what backends compute over chunks of rows: the only autograd code of this op.

The forward computes the loss and its gradients; backward multiplies them by the incoming gradient.
Log-probabilities and entropies save one number per row (those of a teacher's k tokens, k), and backward
recomputes the logits. Saved: the gradients or those numbers, and x, weight, bias, target and the teacher.
Second derivatives use the plain definition, with all logits at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from veomni_hook.kernels.linear_cross_entropy import reference
from veomni_hook.kernels.linear_cross_entropy.objective import (
    NOTHING,
    Objective,
    Teacher,
    TokenStatistics,
    Transform,
    Wanted,
)
from veomni_hook.kernels.shared.autograd import gradients, is_recorded
from veomni_hook.kernels.shared.operand_checks import wants_grad

__all__ = ["Backend", "Form", "Found", "Gradients", "Needed", "loss_and_statistics", "token_statistics"]

_Tensors = tuple[torch.Tensor | None, ...]


class Form(NamedTuple):
    """The non-tensor fields of an `Objective`, and what is wanted.

    ``accumulate`` is here ``in_float32``, the objective's ``distillation`` is ``share``.
    """

    ignore_index: int
    factor: float
    softcap: float | None
    label_smoothing: float
    z_loss: float
    in_float32: bool
    log_probs: bool
    entropy: bool
    predictions: bool
    distillation: bool
    log_prob_min_clamp: float | None = None
    share: float = 0.0

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
            None if objective.teacher is None else objective.teacher.log_prob_min_clamp,
            float(objective.distillation),
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
        loss: ``(x, weight, bias, target, num_items, loss_weights, teacher, form, kept, needed) -> Found``;
            ``kept`` is the dtype of the original weight and of its gradient, if ``weight`` is a
            lower-precision copy; ``teacher``, if the form's ``share`` is not 0, was `Teacher.told`.
        statistics: ``(x, weight, bias, target, ids, form) -> (TokenStatistics, lse, at)``; ``at``
            ``[rows, k]``, float32, are log-probabilities of the tokens ``ids``; None if these are None.
        gradients: ``(x, weight, bias, target, ids, form, lse, entropy, at, to_log_probs, to_entropy, to_at,
            kept, needed) -> Gradients``.
        scale: multiplies a tensor by a scalar tensor, in place.
    """

    loss: Callable[..., Found]
    statistics: Callable[..., tuple[TokenStatistics, torch.Tensor, torch.Tensor | None]]
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
        ids: torch.Tensor | None,
        teachers: torch.Tensor | None,
        backend: Backend,
        form: Form,
    ) -> tuple[torch.Tensor | None, ...]:
        ctx.dtype = compute_dtype(x)
        ctx.backend, ctx.form = backend, form
        with torch.autocast(x.device.type, enabled=False):
            loss, gradients, late, statistics = backend.loss(
                *_cast(ctx.dtype, x, weight, bias), target, num_items, loss_weights,
                _teacher(ids, teachers, form), form, weight.dtype, Needed(*ctx.needs_input_grad[:3]),
            )  # fmt: skip
        ctx.save_for_backward(
            x, weight, bias, target, num_items, loss_weights, ids, teachers, late, *gradients
        )
        ctx.mark_non_differentiable(*(statistic for statistic in statistics if statistic is not None))
        return loss, *statistics

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *_: torch.Tensor) -> _Tensors:
        x, weight, bias, target, num_items, loss_weights, ids, teachers, late, *computed = ctx.saved_tensors
        if is_recorded():
            objective = Objective(
                ctx.form.ignore_index, num_items, ctx.form.transform, ctx.form.label_smoothing,
                ctx.form.z_loss, loss_weights, teacher=_teacher(ids, teachers, ctx.form),
                distillation=ctx.form.share,
            )  # fmt: skip

            def again(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
                x, weight, bias = _cast(ctx.dtype, x, weight, bias)
                return reference.loss_and_statistics(x, weight, bias, target, objective, NOTHING)[0]

            slopes = gradients(again, (x, weight, bias), ctx.needs_input_grad[:3], (grad,))
            return *slopes, *[None] * 7
        factor = (grad if late is None else grad * late).reshape(())
        in_place = (
            not torch.compiler.is_compiling() and not torch._C._autograd._get_current_graph_task_keep_graph()
        )
        return (
            *(
                None
                if gradient is None
                else _scaled(ctx.backend, gradient, factor, of.dtype, in_place=in_place)
                for gradient, of in zip(computed, (x, weight, bias), strict=True)
            ),
            *[None] * 7,
        )


class _Statistics(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        target: torch.Tensor,
        ids: torch.Tensor | None,
        backend: Backend,
        form: Form,
    ) -> tuple[torch.Tensor | None, ...]:
        ctx.dtype = compute_dtype(x)
        ctx.backend, ctx.form = backend, form
        ctx.set_materialize_grads(False)
        with torch.autocast(x.device.type, enabled=False):
            statistics, lse, at = backend.statistics(*_cast(ctx.dtype, x, weight, bias), target, ids, form)
        ctx.save_for_backward(x, weight, bias, target, ids, lse, statistics.entropy, at)
        if statistics.predictions is not None:
            ctx.mark_non_differentiable(statistics.predictions)
        return *statistics[:3], at

    @staticmethod
    def backward(
        ctx: Any,
        to_log_probs: torch.Tensor | None,
        to_entropy: torch.Tensor | None,
        _: object,
        to_at: torch.Tensor | None,
    ) -> _Tensors:
        x, weight, bias, target, ids, lse, entropy, at = ctx.saved_tensors
        if is_recorded():
            objective = Objective(ctx.form.ignore_index, transform=ctx.form.transform)
            incoming = tuple(tensor for tensor in (to_log_probs, to_entropy, to_at) if tensor is not None)
            wanted = Wanted(to_log_probs is not None, to_entropy is not None)

            def again(
                x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
            ) -> tuple[torch.Tensor, ...]:
                x, weight, bias = _cast(ctx.dtype, x, weight, bias)
                logits = reference.logits_of(x, weight, bias, objective)
                statistics = reference.statistics_of(logits, target, ctx.form.ignore_index, wanted)
                of_teacher = () if to_at is None else (reference.log_probs_at(logits, ids),)
                return *(tensor for tensor in statistics if tensor is not None), *of_teacher

            slopes = gradients(again, (x, weight, bias), ctx.needs_input_grad[:3], incoming)
            return *slopes, *[None] * 4
        with torch.autocast(x.device.type, enabled=False):
            slopes = ctx.backend.gradients(
                *_cast(ctx.dtype, x, weight, bias), target, ids, ctx.form, lse, entropy, at, to_log_probs,
                to_entropy, to_at, weight.dtype, Needed(*ctx.needs_input_grad[:3]),
            )  # fmt: skip
        return (
            *(
                None if gradient is None else gradient.to(of.dtype)
                for gradient, of in zip(slopes, (x, weight, bias), strict=True)
            ),
            *[None] * 4,
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
    told = _told(objective, target) if form.share else (None, None, None)
    loss, *statistics = _Loss.apply(x, weight, bias, target, items, weights, *told[:2], backend, form)  # type: ignore[no-untyped-call]
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
    """Return statistics of every row, from ``backend``.

    Gradients: of ``log_probs``, ``entropy``, ``distillation_losses`` and ``student_mass``.
    """
    form = Form.of(objective, wanted)
    told = _told(objective, target) if form.distillation else None
    ids = None if told is None else told.topk_ids
    numbers = _Statistics.apply(x, weight, bias, target, ids, backend, form)  # type: ignore[no-untyped-call]
    log_probs, entropy, predictions, at = numbers
    if told is None:
        return TokenStatistics(log_probs, entropy, predictions)
    beside = told.divergence(at, target != objective.ignore_index)
    return TokenStatistics(log_probs, entropy, predictions, *beside)


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


def _told(objective: Objective, target: torch.Tensor) -> Teacher:
    assert objective.teacher is not None  # noqa: S101 - `Objective.wrong` says so
    return objective.teacher.told(target, objective.ignore_index)


def _teacher(ids: torch.Tensor | None, log_probs: torch.Tensor | None, form: Form) -> Teacher | None:
    return None if ids is None or log_probs is None else Teacher(ids, log_probs, form.log_prob_min_clamp)


def _cast(dtype: torch.dtype, *tensors: torch.Tensor | None) -> list[Any]:
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
