"""The output of a sequence classifier, as `loss_options` and the config's ``token_outputs`` request it.

A classifier has one row of logits for each sequence, ``[batch, classes]``, and one label. Patched code passes
its output here; without a request it is returned as it is. With so few logits there is nothing to fuse: the
definition computes the fields, and the loss if options change it.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.utils import ModelOutput

from veomni_hook.kernels.linear_cross_entropy.objective import NOTHING, Objective
from veomni_hook.kernels.linear_cross_entropy.options import (
    active,
    leave_to_upstream,
    note,
    token_outputs_of,
)
from veomni_hook.kernels.selection.process_choice import STATE
from veomni_hook.kernels.shared.history import following

__all__ = ["output"]

_IGNORED = -100
_LOSS = "ForSequenceClassificationLoss"


def output(model: Any, labels: torch.Tensor | None, output_: Any) -> Any:
    """Return ``output_``, the output of a classifier, with the requested fields.

    Args:
        model: the classifier.
        labels: a class for each sequence, int64 of ``batch`` elements, or None.
        output_: has ``loss`` and ``logits`` ``[batch, classes]``.

    Raises:
        KernelError: fields or another loss are requested, but the labels are not classes, or the loss is
            not the cross-entropy of transformers.
    """
    compiling = torch.compiler.is_compiling()
    request = None if compiling else active(model)
    names = token_outputs_of(model)
    number = 0 if compiling else following()
    if not STATE.active or labels is None or not (names or request is not None):
        if not compiling:
            note(model, number, None)
        return output_
    reason = _refuses(model, labels, output_)
    if reason is not None:
        leave_to_upstream(model, reason)
        return output_
    # Here, because few calls get here.
    from veomni_hook.kernels.linear_cross_entropy import output as outputs
    from veomni_hook.kernels.linear_cross_entropy import reference, token_outputs

    target = labels.to(output_.logits.device).reshape(-1)
    objective, wanted, changed = Objective(), NOTHING, False
    if request is not None:
        options = request.options
        objective, wanted, changed = options.objective, options.wanted, bool(options.changes_loss)
    logits = objective.transform(output_.logits).float()
    if changed:
        weights = objective.loss_weights
        weights = None if weights is None else weights.to(target.device).reshape(-1)
        objective = Objective(
            _IGNORED, None, objective.transform, objective.label_smoothing, objective.z_loss, weights
        )
        output_.loss = reference.loss_of(logits, target, objective)
    wanted = token_outputs.wanted_for(names, wanted) if names else wanted
    if wanted != NOTHING:
        statistics = reference.statistics_of(logits, target, _IGNORED, wanted)
    if not compiling:
        note(model, number, output_.loss)
    if request is not None:
        request.report.take(statistics if wanted != NOTHING else None, target, _IGNORED, labels.shape)
    if not names:
        return output_
    values = token_outputs.values(statistics, target, _IGNORED, names, labels.shape)
    more = {name: value.clone() for name, value in values.items()}  # FSDP2 loses its hook of a view
    return outputs.with_deferred_logits(output_, more)


def _refuses(model: Any, labels: torch.Tensor, output: object) -> str | None:
    """Return why this output can have neither fields nor another loss, or None."""
    if not isinstance(output, ModelOutput):
        return f"the output is a {type(output).__name__}"
    # dynamo (torch 2.13) does not know `__qualname__`.
    if getattr(model.loss_function, "__name__", None) != _LOSS:
        return "the model has its own loss_function"
    problem = getattr(model.config, "problem_type", None)
    if problem != "single_label_classification" or labels.dtype is not torch.int64:
        return f"the labels are not classes (problem_type: {problem}, {labels.dtype})"
    return None
