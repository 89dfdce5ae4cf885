"""Losses, statistics and gradients of a chunk of logits in plain PyTorch; gradients overwrite the logits.

Rows are processed a few at a time, so that no temporary is as large as the chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from veomni_hook.kernels.linear_cross_entropy.autograd import Form
from veomni_hook.kernels.linear_cross_entropy.objective import Teacher

__all__ = ["Rows", "loss", "overwrite", "slices"]

# Logits per step: on a CPU they fit into its caches, on a GPU they keep a launch busy.
SLICE_LOGITS, SLICE_LOGITS_GPU = 1 << 19, 1 << 26
# exp(-104) is 0 in float32.
_VANISHED = -128.0


class Rows(NamedTuple):
    """Results of rows, ``[rows]``; ``losses`` are weighted, and 0 for ignored rows.

    ``at`` ``[rows, k]`` are log-probabilities of the tokens ``ids`` ``[rows, k]``.
    """

    losses: torch.Tensor
    lse: torch.Tensor
    log_probs: torch.Tensor
    entropy: torch.Tensor
    predictions: torch.Tensor
    ids: torch.Tensor
    at: torch.Tensor

    @classmethod
    def empty(cls, x: torch.Tensor, form: Form, ids: torch.Tensor | None = None) -> Rows:
        """Allocate results for the rows of ``x``; without ``ids``, ``k`` is 0."""
        # Each in memory of its own: torch 2.11 cannot trace a function that returns several views of one.
        losses, lse, log_probs, entropy = (x.new_zeros(x.shape[0], dtype=torch.float32) for _ in range(4))
        tokens = x.new_empty(x.shape[0] if form.predictions else 0, dtype=torch.int64)
        ids = x.new_empty((x.shape[0], 0), dtype=torch.int64) if ids is None else ids
        return cls(losses, lse, log_probs, entropy, tokens, ids, losses.new_empty(ids.shape))

    def part(self, rows: slice) -> Rows:
        """Return views of some of the rows."""
        return Rows(*(tensor[rows] for tensor in self))


class _Slopes(NamedTuple):
    """Terms of a row's gradient: a factor of each probability, and constants at the goal and everywhere."""

    of_probability: torch.Tensor
    of_goal: torch.Tensor
    of_all: torch.Tensor | None = None
    #: Further constants, ``[rows, k]``, at tokens ``[rows, k]``.
    of_tokens: torch.Tensor | None = None
    tokens: torch.Tensor | None = None


def loss(
    logits: torch.Tensor,
    target: torch.Tensor,
    weights: torch.Tensor,
    scale: torch.Tensor | float,
    form: Form,
    statistics: Rows,
    teacher: Teacher | None = None,
    *,
    gradient: bool,
) -> None:
    """Fill ``statistics``; if ``gradient``, overwrite ``logits`` with ``scale`` times the losses' gradient.

    ``weights`` ``[rows]`` are the losses' weights, 0 where ``target`` is ``ignore_index``. ``teacher``, with
    the tokens of ``statistics``, is a part of the losses.
    """
    for rows in slices(logits):
        z, capped = _transformed(logits[rows], form)
        counts = target[rows] != form.ignore_index
        goal = target[rows].where(counts, 0)[:, None]
        here = statistics.part(rows)
        if form.predictions:
            top, first = z.max(-1, keepdim=True)
            here.predictions.copy_(first[:, 0].where(counts, form.ignore_index))
        else:
            top = z.amax(-1, keepdim=True)  # five times as fast on a CPU
        at_goal = z.gather(1, goal)[:, 0]
        z_of_tokens = z.gather(1, here.ids) if here.ids.shape[1] else None
        mean = z.mean(-1) if form.label_smoothing else 0.0
        apart = z.sub_(top)
        power = apart.exp() if form.entropy else apart.exp_()
        summed = power.sum(-1)
        here.lse.copy_(top[:, 0] + summed.log())
        here.log_probs.copy_((at_goal - here.lse).where(counts, 0))
        if z_of_tokens is not None:
            here.at.copy_((z_of_tokens - here.lse[:, None]).where(counts[:, None], 0))
        if form.entropy:
            total = apart.clamp_(min=_VANISHED).mul_(power).sum(-1)
            here.entropy.copy_((summed.log() - total / summed).where(counts, 0))
        smooth = form.label_smoothing
        losses = here.lse - (1 - smooth) * at_goal - smooth * mean + form.z_loss * here.lse.square()
        own = None if teacher is None else teacher.of_rows(rows)
        if own is not None:
            losses = losses.lerp(own.divergence(here.at, counts).losses, form.share)
        here.losses.copy_((weights[rows] * losses).where(counts, 0))
        if gradient:
            of_row = weights[rows] * scale * (1 - form.share)
            of_probability = of_row * (1 + 2 * form.z_loss * here.lse)
            of_tokens = None
            if own is not None:
                of_tokens = own.slopes(here.at) * (weights[rows] * scale * form.share)[:, None]
                of_probability = of_probability - of_tokens.sum(-1)
            slopes = _Slopes(
                of_probability / summed, of_row * (smooth - 1), of_row * (-smooth / z.shape[-1]), of_tokens,
                here.ids,
            )  # fmt: skip
            slopes_of_logits = _gradient(power, goal, slopes, form, capped)
            # In float32 without cap or entropy, ``made`` already shares the memory of the logits.
            if logits.dtype is not torch.float32 or capped is not None or form.entropy:
                logits[rows].copy_(slopes_of_logits)


def overwrite(
    logits: torch.Tensor,
    target: torch.Tensor,
    form: Form,
    lse: torch.Tensor,
    entropy: torch.Tensor | None,
    to_log_probs: torch.Tensor | None,
    to_entropy: torch.Tensor | None,
    ids: torch.Tensor | None,
    to_at: torch.Tensor | None,
) -> None:
    """Overwrite ``logits`` with the gradient of log-probabilities and entropies.

    ``ids`` and ``to_at`` are ``[rows, k]``, the rest is ``[rows]``.
    """
    for rows in slices(logits):
        z, capped = _transformed(logits[rows], form)
        counts = target[rows] != form.ignore_index
        goal = target[rows].where(counts, 0)[:, None]
        of_goal = torch.zeros_like(lse[rows]) if to_log_probs is None else to_log_probs[rows].where(counts, 0)
        power = (z - lse[rows, None]).exp_()
        of_probability = -of_goal
        slopes = _Slopes(of_probability, of_goal)
        if to_at is not None and ids is not None:
            of_tokens = to_at[rows].where(counts[:, None], 0)
            of_probability = of_probability - of_tokens.sum(-1)
            slopes = _Slopes(of_probability, of_goal, None, of_tokens, ids[rows])
        if to_entropy is not None and entropy is not None:
            back = to_entropy[rows].where(counts, 0)
            # The gradient of the entropy is -p * (log(p) + entropy).
            z.sub_((lse[rows] - entropy[rows])[:, None]).clamp_(min=2 * _VANISHED)
            power.mul_(of_probability[:, None] - back[:, None] * z)
            slopes = slopes._replace(of_probability=torch.ones_like(of_goal))
        logits[rows].copy_(_gradient(power, goal, slopes, form, capped))


def slices(logits: torch.Tensor, most: int | None = None) -> Iterator[slice]:
    """Yield slices of at most ``most`` rows."""
    rows, vocab = logits.shape
    step = max(1, (SLICE_LOGITS if logits.device.type == "cpu" else SLICE_LOGITS_GPU) // vocab)
    step = step if most is None else min(step, most)
    return (slice(start, start + step) for start in range(0, rows, step))


def _transformed(raw: torch.Tensor, form: Form) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the logits in float32, in new memory or that of ``raw``, and the tanh of a cap."""
    z = raw.float()
    if form.softcap is None:
        return (z.mul_(form.factor) if form.factor != 1 else z), None
    capped = z.mul_(form.factor / form.softcap).tanh_()
    return capped * form.softcap, capped


def _gradient(
    power: torch.Tensor, goal: torch.Tensor, slopes: _Slopes, form: Form, capped: torch.Tensor | None
) -> torch.Tensor:
    """Turn ``power``, a multiple of the probabilities, into the gradient of the logits, in place."""
    power.mul_((slopes.of_probability * form.factor)[:, None])
    if slopes.of_all is not None and form.label_smoothing:
        power.add_((slopes.of_all * form.factor)[:, None])
    power.scatter_add_(1, goal, (slopes.of_goal * form.factor)[:, None])
    if slopes.of_tokens is not None and slopes.tokens is not None:
        power.scatter_add_(1, slopes.tokens, slopes.of_tokens * form.factor)
    if capped is not None:
        power.mul_(capped.square_().neg_().add_(1))
    return power
