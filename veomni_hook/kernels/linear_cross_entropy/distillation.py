"""The divergence from a teacher, from the log-probabilities that a model gives the teacher's tokens.

Backends compute these, ``[rows, k]``, from their chunks of logits, and take their gradient. All the rest is
here, in plain PyTorch: it is as small as ``k`` is beside the vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from veomni_hook.kernels.linear_cross_entropy.objective import Teacher

__all__ = ["Quantities", "quantities", "slopes", "told"]


class Quantities(NamedTuple):
    """The last three fields of `TokenStatistics`."""

    losses: torch.Tensor
    student_mass: torch.Tensor
    teacher_mass: torch.Tensor


def told(teacher: Teacher, target: torch.Tensor, ignored: int) -> Teacher:
    """Return ``teacher`` on the device of ``target``, in float32.

    Ids of ignored rows may be any; they become 0.
    """
    ids, log_probs, clamp = teacher
    counts = (target != ignored)[:, None]
    ids = ids.to(target.device).where(counts, 0)
    return Teacher(ids, log_probs.detach().to(target.device, torch.float32), clamp)


def quantities(at: torch.Tensor, teacher: Teacher, counts: torch.Tensor) -> Quantities:
    """Return losses and masses ``[rows]``, 0 where not ``counts``, for a teacher that was `told`.

    ``at`` ``[rows, k]`` are the model's log-probabilities of the teacher's tokens; it may require a gradient.
    """
    log_p = teacher.topk_log_probs
    masses = (each.exp().sum(-1).where(counts, 0) for each in (at, log_p))
    log_p, at = (_clamped(each, teacher.log_prob_min_clamp) for each in (log_p, at))
    p = log_p.exp()
    # A token that the teacher excludes (-inf) adds nothing.
    losses = (p * (log_p - at)).where(p > 0, 0).sum(-1).where(counts, 0)
    return Quantities(losses, *masses)


def slopes(at: torch.Tensor, teacher: Teacher) -> torch.Tensor:
    """Return the gradient of the losses of `quantities` with respect to ``at``."""
    clamp = teacher.log_prob_min_clamp
    p = -_clamped(teacher.topk_log_probs, clamp).exp()
    return p if clamp is None else p.where(at >= clamp, 0)


def _clamped(log_probs: torch.Tensor, clamp: float | None) -> torch.Tensor:
    return log_probs if clamp is None else log_probs.clamp(min=clamp)
