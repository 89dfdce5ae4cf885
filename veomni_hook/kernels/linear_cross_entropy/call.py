"""One call of a language model, as the guard in its ``forward`` passes it to the fused loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from veomni_hook.errors import KernelError
from veomni_hook.kernels.linear_cross_entropy import head as heads
from veomni_hook.kernels.linear_cross_entropy import losses, token_outputs
from veomni_hook.kernels.linear_cross_entropy.objective import IDENTITY, NOTHING, Objective, Transform, Wanted
from veomni_hook.kernels.linear_cross_entropy.options import active, token_outputs_of

__all__ = ["Call"]

_MODULES = ("before_head", "capped_by")


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
            logits, its class, and its attribute that is the cap; and the fields of `Transform`.
    """

    model: Any
    hidden_states: torch.Tensor
    head: Any
    labels: Any
    vocab_size: int
    loss_kwargs: Mapping[str, Any]
    options: Mapping[str, Any] = {}

    @classmethod
    def of(cls, *call: Any) -> Call:
        """Return the call with its cap; ``before_head`` becomes the head of an ``nn.Identity``."""
        call_of = cls(*call)
        if (capped_by := call_of.options.get("capped_by")) is not None:
            module, _, name = capped_by
            call_of = call_of._replace(options={**call_of.options, "softcap": getattr(module, name, None)})
        before_head = call_of.options.get("before_head")
        if type(call_of.head) is not nn.Identity or before_head is None:
            return call_of
        if "forward" in call_of.head.__dict__ or heads.calls_refuse(call_of.head) is not None:
            return call_of
        options = {name: value for name, value in call_of.options.items() if name != "before_head"}
        return call_of._replace(head=before_head, options=options)

    @property
    def transform(self) -> Transform:
        """The transform applied to logits before the loss."""
        if not self.options:
            return IDENTITY
        return Transform(**{name: value for name, value in self.options.items() if name not in _MODULES})

    @property
    def given(self) -> Any:
        """The labels that the loss function uses, in their original shape."""
        shift_labels = self.loss_kwargs.get("shift_labels")
        known = losses.reads_shift_labels(self.model.loss_function) and shift_labels is not None
        return shift_labels if known else self.labels

    def shifted(self, labels: object, filled: float) -> torch.Tensor:
        """Align values given per label with the positions that predict the labels, ``[rows]``."""
        shift_labels = self.loss_kwargs.get("shift_labels")
        if labels is not self.labels and shift_labels is not None:
            shift_labels = labels
        return losses.targets(self.model.loss_function, labels, shift_labels, filled)

    @property
    def objective(self) -> tuple[Objective, Wanted]:
        """What the call, `loss_options` and the model's config request."""
        objective = Objective(
            self.loss_kwargs.get("ignore_index", -100),
            self.loss_kwargs.get("num_items_in_batch"),
            self.transform,
        )
        request = active(self.model)
        beside = NOTHING if request is None else request.options.wanted
        names = token_outputs_of(self.model)
        wanted = token_outputs.wanted_for(names, beside) if names else beside
        if request is None:
            return objective, wanted
        options, weights = request.options, request.options.loss_weights
        if weights is not None:
            if weights.shape != self.given.shape:
                raise KernelError(
                    f"loss_weights have the shape {[*weights.shape]}, the labels {[*self.given.shape]}",
                    where=type(self.model).__name__,
                    fix="give each label a weight",
                )
            weights = self.shifted(weights, 0)
        asked = objective._replace(
            transform=self.transform.at(options.temperature),
            label_smoothing=options.label_smoothing,
            z_loss=options.z_loss,
            loss_weights=weights,
            accumulate=options.accumulate,
        )
        return asked, wanted
