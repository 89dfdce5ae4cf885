"""The linear cross-entropy and the score of the last token by definition: the oracles for tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from veomni_hook.kernels.linear_cross_entropy.objective import (
    NOTHING,
    Divergence,
    Objective,
    Teacher,
    TokenStatistics,
    Wanted,
)

__all__ = [
    "last_token",
    "linear_cross_entropy",
    "log_probs_at",
    "logits_of",
    "loss_and_statistics",
    "loss_of",
    "statistics_of",
    "token_statistics",
    "unable",
]


def linear_cross_entropy(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    **objective: Any,
) -> torch.Tensor:
    """Return the loss: by default the mean cross-entropy over positions that count; float32.

    ``hidden_states`` is ``[rows, hidden]``, ``weight`` ``[vocab, hidden]``, ``bias`` ``[vocab]``, ``target``
    ``[rows]`` (int64). ``objective`` are fields of `Objective`, which has the formula.
    """
    return loss_and_statistics(hidden_states, weight, bias, target, Objective(**objective), NOTHING)[0]


def loss_and_statistics(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    objective: Objective,
    wanted: Wanted,
) -> tuple[torch.Tensor, TokenStatistics]:
    """Return the loss and what is ``wanted`` beside it, which has no gradient."""
    logits = logits_of(hidden_states, weight, bias, objective)
    with torch.no_grad():
        statistics = statistics_of(logits, target, objective.ignore_index, wanted, objective.teacher)
    return loss_of(logits, target, objective), statistics


def logits_of(
    hidden_states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, objective: Objective
) -> torch.Tensor:
    """Return the transformed logits ``[rows, vocab]``, float32."""
    return objective.transform(functional.linear(hidden_states, weight, bias)).float()


def loss_of(logits: torch.Tensor, target: torch.Tensor, objective: Objective) -> torch.Tensor:
    """Return the loss of ``logits`` ``[rows, vocab]``, float32, that are transformed already."""
    weights, num_items = objective.loss_weights, objective.num_items
    ignored = objective.ignore_index
    options: dict[str, Any] = {"ignore_index": ignored, "label_smoothing": objective.label_smoothing}
    if weights is None and not objective.z_loss and not objective.distillation:
        reduction = "mean" if num_items is None else "sum"
        loss = functional.cross_entropy(logits, target, reduction=reduction, **options)
    else:
        counts = (target != ignored).float() if weights is None else weights.where(target != ignored, 0)
        losses = functional.cross_entropy(logits, target, reduction="none", **options)
        losses = losses + objective.z_loss * logits.logsumexp(-1).square()
        if objective.distillation:
            assert objective.teacher is not None  # noqa: S101 - `Objective.wrong` says so
            beside = _of_teacher(logits, target, ignored, objective.teacher)
            losses = losses.lerp(beside.losses, objective.distillation)
        loss = (counts.float() * losses).where(target != ignored, 0).sum()
        if num_items is None:
            loss = loss / counts.sum()
    if isinstance(num_items, torch.Tensor):
        num_items = num_items.to(loss.device)
    return loss if num_items is None else loss / num_items


def token_statistics(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    objective: Objective,
    wanted: Wanted,
) -> TokenStatistics:
    """Return what is ``wanted`` of every row, with gradients."""
    logits = logits_of(hidden_states, weight, bias, objective)
    return statistics_of(logits, target, objective.ignore_index, wanted, objective.teacher)


def unable(
    hidden_states: torch.Tensor, weight: torch.Tensor, objective: Objective, wanted: Wanted
) -> str | None:
    """Return None: it computes everything."""
    return None


def last_token(hidden_states: torch.Tensor, score: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return the scores ``[batch, length, labels]`` of all positions; the caller picks one of each row."""
    return score(hidden_states)


def statistics_of(
    logits: torch.Tensor,
    target: torch.Tensor,
    ignored: int,
    wanted: Wanted,
    teacher: Teacher | None = None,
) -> TokenStatistics:
    """Return what is ``wanted`` of ``logits`` ``[rows, vocab]``, float32, with gradients."""
    log_probs = entropy = predictions = None
    counts = target != ignored
    if wanted.log_probs:
        log_probs = -functional.cross_entropy(logits, target, ignore_index=ignored, reduction="none")
    if wanted.entropy:
        every = logits.log_softmax(-1)
        entropy = -(every.exp() * every).sum(-1).where(counts, 0)
    if wanted.predictions:
        predictions = logits.argmax(-1).where(counts, ignored)
    if not wanted.distillation or teacher is None:
        return TokenStatistics(log_probs, entropy, predictions)
    return TokenStatistics(log_probs, entropy, predictions, *_of_teacher(logits, target, ignored, teacher))


def _of_teacher(logits: torch.Tensor, target: torch.Tensor, ignored: int, teacher: Teacher) -> Divergence:
    teacher = teacher.told(target, ignored)
    return teacher.divergence(log_probs_at(logits, teacher.topk_ids), target != ignored)


def log_probs_at(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities of the tokens ``ids`` ``[rows, k]``, with gradients."""
    return logits.log_softmax(-1).gather(-1, ids)
