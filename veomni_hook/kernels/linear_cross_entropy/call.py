"""One call of a language model, as the guard in its ``forward`` passes it to the fused loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from veomni_hook.errors import KernelError
from veomni_hook.kernels.linear_cross_entropy import head as heads
from veomni_hook.kernels.linear_cross_entropy import losses, requested_call, token_outputs
from veomni_hook.kernels.linear_cross_entropy.objective import (
    IDENTITY,
    NOTHING,
    Objective,
    Teacher,
    Transform,
    Wanted,
)
from veomni_hook.kernels.linear_cross_entropy.options import (
    active,
    fields_of,
    token_outputs_of,
)

__all__ = ["Call"]

_OTHERS = ("before_head", "capped_by", "keywords")


class Call(NamedTuple):
    """One call of a model.

    Attributes:
        model: the module whose ``forward`` contains the guard.
        hidden_states: ``[..., hidden]``, the input of ``before_head`` if given, else of the head.
        head: the module that computes logits ``[..., vocab]``.
        labels: one int64 for each position, as the loss function takes them.
        vocab_size: the vocabulary size passed to the loss function.
        loss_kwargs: all other keywords passed to the loss function.
        options: ``before_head``, a module applied to hidden states first; ``capped_by``, a module that caps
            logits, its class, and its attribute that is the cap; ``keywords``, those of the model's call that
            the loss function does not get; and the fields of `Transform`.
    """

    model: Any
    hidden_states: torch.Tensor
    head: Any
    labels: Any
    vocab_size: int
    loss_kwargs: Mapping[str, Any]
    options: Mapping[str, Any] = {}

    @staticmethod
    def of(*call: Any) -> Call:
        """Return the call with its cap; ``before_head`` becomes the head of an ``nn.Identity``.

        What asks for more than a loss is among the loss's keywords then.
        """
        # By name, and no `_replace`: dynamo before torch 2.13 fails where only an object tells its class.
        plain = Call(*call)
        keywords, options = requested_call.keywords_of(*call[1:]), plain.options
        if (capped_by := options.get("capped_by")) is not None:
            module, _, name = capped_by
            options = {**options, "softcap": getattr(module, name, None)}
        head, before_head = plain.head, options.get("before_head")
        is_identity = type(head) is nn.Identity and "forward" not in head.__dict__
        if is_identity and before_head is not None and heads.calls_refuse(head) is None:
            head = before_head
            options = {name: value for name, value in options.items() if name != "before_head"}
        return Call(plain.model, plain.hidden_states, head, plain.labels, plain.vocab_size, keywords, options)

    @property
    def transform(self) -> Transform:
        """The transform applied to logits before the loss."""
        if not self.options:
            return IDENTITY
        return Transform(**{name: value for name, value in self.options.items() if name not in _OTHERS})

    @property
    def shift_labels(self) -> Any:
        """The labels of the call that are shifted already, if the loss function uses such labels, or None."""
        known = losses.reads_shift_labels(self.model.loss_function)
        return self.loss_kwargs.get("shift_labels") if known else None

    @property
    def given(self) -> Any:
        """The labels that the loss function uses, in their original shape."""
        return self.labels if self.shift_labels is None else self.shift_labels

    def shifted(self, labels: object, filled: float) -> torch.Tensor:
        """Align values given per label with the positions that predict the labels, ``[rows]``."""
        shift_labels = self.shift_labels
        if labels is not self.labels and shift_labels is not None:
            shift_labels = labels
        return losses.targets(self.model.loss_function, labels, shift_labels, filled)

    @property
    def names(self) -> tuple[str, ...]:
        """The fields that are asked for."""
        return token_outputs_of(*self)

    @property
    def objective(self) -> tuple[Objective, Wanted]:
        """What the call, `loss_options` and the model's config request."""
        keywords, where = self.loss_kwargs, type(self.model).__name__
        objective, temperature, wanted = Objective(), 1.0, NOTHING
        request = None if torch.compiler.is_compiling() else active(self.model)
        if request is not None:
            options = request.options
            objective, temperature, wanted = options.objective, options.temperature, options.wanted
        if requested_call.asks(keywords):
            # Such a call has no loss.
            teacher = requested_call.teacher_of(keywords, where) or objective.teacher
            objective = Objective(accumulate=objective.accumulate, teacher=teacher)
            temperature = keywords.get("temperature", temperature)
        if names := self.names:
            wanted = token_outputs.wanted_for(names, wanted, distilled=objective.distillation != 0)
        transform, teacher = self.transform.at(temperature, where), self._rows_of(objective.teacher)
        weights = objective.loss_weights
        if weights is not None:
            if weights.shape != self.given.shape:
                raise KernelError(
                    f"loss_weights have the shape {[*weights.shape]}, the labels {[*self.given.shape]}",
                    where=where,
                    fix="give each label a weight",
                )
            weights = self.shifted(weights, 0)
        return Objective(
            keywords.get("ignore_index", -100), keywords.get("num_items_in_batch"), transform,
            objective.label_smoothing, objective.z_loss, weights, objective.accumulate, teacher,
            objective.distillation,
        ), wanted  # fmt: skip

    def fields_among(self, values: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Return the further fields of the output, of the ``values`` of `names`."""
        more: dict[str, Any] = {name: values[name] for name in fields_of(self.model)}
        if names := requested_call.fields_of(self.loss_kwargs):
            own = {name: values[name] for name in names}
            more[requested_call.FIELD] = requested_call.FusedLinearAuxOutput(**own)
        return more

    def _rows_of(self, teacher: Teacher | None) -> Teacher | None:
        """Align a teacher of each label with the positions that predict the labels, ``[rows, k]``."""
        if teacher is None:
            return None
        if (wrong := teacher.wrong(self.given.shape)) is not None:
            fix = "pass tensors of the shape of the labels and one dimension more, for the tokens"
            raise KernelError(wrong, where=type(self.model).__name__, fix=fix)
        known = losses.reads_shift_labels(self.model.loss_function)
        if known and self.loss_kwargs.get("shift_labels") is None:
            teacher = teacher.shifted()
        return teacher.rows()
