"""Chosen tokens of each row of a chunk of logits, beside the label: log-probabilities, and their gradient.

For kernels whose program holds a row: they compute a row's gradient as if only the label had a constant of
its own, and this overwrites it at the ``k`` tokens, in float32 from saved numbers: each is rounded once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from veomni_hook.kernels.linear_cross_entropy.objective import Transform

__all__ = ["Incoming", "log_probs", "overwrite"]

# Elements of a comparison of each token of a row with each.
_PAIRS = 1 << 24


class Incoming(NamedTuple):
    """Gradients of numbers of rows, ``[rows]``, and ``at`` ``[rows, k]``, that of chosen tokens.

    ``others`` is what is subtracted from the factor of each probability for these.
    """

    log_probs: Tensor | None
    entropy: Tensor | None
    at: Tensor | None
    others: Tensor | None


def log_probs(logits: Tensor, ids: Tensor, lse: Tensor, counts: Tensor, transform: Transform) -> Tensor:
    """Return those of the tokens ``ids`` ``[rows, k]``, float32; 0 for rows that do not count."""
    return (transform(logits.gather(1, ids)).float() - lse[:, None]).where(counts[:, None], 0)


def overwrite(
    logits: Tensor,
    ids: Tensor,
    at: Tensor,
    target: Tensor,
    lse: Tensor,
    entropy: Tensor | None,
    counts: Tensor,
    incoming: Incoming,
    transform: Transform,
) -> None:
    """Write the whole gradient of the logits at the tokens ``ids`` whose log-probabilities are ``at``.

    ``logits`` are the gradient that `veomni_hook.kernels.linear_cross_entropy.device.gradient` made.
    """
    assert incoming.at is not None and incoming.others is not None  # noqa: S101 - else there is nothing to write
    of_probability, p, z = -incoming.others[:, None], at.exp(), at + lse[:, None]
    slopes = _merged(ids, incoming.at)
    if incoming.log_probs is not None:
        of_label = incoming.log_probs[:, None]
        of_probability = of_probability - of_label
        slopes = slopes + of_label.where(ids == target[:, None], 0)
    if incoming.entropy is not None and entropy is not None:
        of_probability = of_probability - incoming.entropy[:, None] * (at.where(p > 0, 0) + entropy[:, None])
    slopes = slopes + p * of_probability
    if transform.softcap is not None:
        slopes = slopes * (1 - (z / transform.softcap).square())
    logits.scatter_(1, ids, (slopes * transform.factor).where(counts[:, None], 0).to(logits.dtype))


def _merged(ids: Tensor, numbers: Tensor) -> Tensor:
    """Return ``numbers`` ``[rows, k]``; a token that a row has twice gets the sum at each of its places.

    The sums have equal bits from run to run, which those of atomics would not.
    """
    sums = torch.empty_like(numbers)
    step = max(1, _PAIRS // max(1, ids.shape[1] ** 2))
    for start in range(0, ids.shape[0], step):
        part = slice(start, start + step)
        same = ids[part, :, None] == ids[part, None, :]
        torch.sum(numbers[part, None, :].where(same, 0), -1, out=sums[part])
    return sums
