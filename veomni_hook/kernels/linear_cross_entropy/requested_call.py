"""Keywords by which a call of a model asks for log-probabilities of its labels, with VeOmni's names.

    output = model(**batch, labels=labels, return_log_probs=True, temperature=0.7)
    output.fused_linear_aux.log_probs

They are the fields of `veomni_hook.kernels.linear_cross_entropy.token_outputs` in one object, and such a call
has no loss and no logits. With ``teacher_topk_ids`` and ``teacher_topk_log_probs`` (``[..., k]``, as labels),
and ``log_prob_min_clamp``, there is the divergence from a teacher, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers.utils import ModelOutput

from veomni_hook.errors import KernelError
from veomni_hook.kernels.linear_cross_entropy.objective import OF_TEACHER, Teacher

__all__ = ["ALSO", "FIELD", "FusedLinearAuxOutput", "asks", "fields_of", "keywords_of", "teacher_of"]

#: The field of an output.
FIELD = "fused_linear_aux"
#: What the output has as attributes, too.
ALSO = ("log_probs", "entropy")


@dataclass
class FusedLinearAuxOutput(ModelOutput):  # type: ignore[misc]
    """Numbers of each label, float32, in the shape of the labels; 0 for ignored labels.

    Attributes:
        log_probs: its log-probability, with a gradient.
        entropy: of the distribution that predicts it, in nats, with a gradient.
        distillation_losses: the divergence from a teacher (`Teacher`), with a gradient.
        student_mass: the model's probability of the teacher's tokens.
        teacher_mass: the teacher's probability of them.
    """

    log_probs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    distillation_losses: torch.Tensor | None = None
    student_mass: torch.Tensor | None = None
    teacher_mass: torch.Tensor | None = None


def keywords_of(*operands: Any) -> Mapping[str, Any]:
    """Return the loss's keywords in a guard's ``operands``; with the model's, if these ask for more."""
    keywords: Mapping[str, Any] = operands[4] if len(operands) > 4 else {}
    rest = operands[5].get("keywords", {}) if len(operands) > 5 else {}
    return {**rest, **keywords} if asks(rest) else keywords


def asks(keywords: Mapping[str, Any]) -> bool:
    """Return whether a call with these keywords asks for log-probabilities."""
    return bool(keywords.get("return_log_probs"))


def fields_of(keywords: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the fields that such a call asks for."""
    if not asks(keywords):
        return ()
    return ("log_probs", "entropy", *(() if keywords.get("teacher_topk_ids") is None else OF_TEACHER))


def teacher_of(keywords: Mapping[str, Any], where: str) -> Teacher | None:
    """Return the teacher that such a call passes, or None.

    Raises:
        KernelError: it passes half of it; ``where`` is what is called.
    """
    ids, log_probs = (keywords.get(f"teacher_{name}") for name in ("topk_ids", "topk_log_probs"))
    if (ids is None) != (log_probs is None):
        absent = "teacher_topk_ids" if ids is None else "teacher_topk_log_probs"
        raise KernelError(f"there is no {absent}", where=where, fix="pass both tensors of a teacher, or none")
    if ids is None or log_probs is None:
        return None
    return Teacher(ids, log_probs, keywords.get("log_prob_min_clamp"))
