"""A loss whose rows several processes share: each computes the loss of its rows, and the losses are averaged.

All of them have all rows, because the layers' output was gathered; without this, all would compute the same
loss. `veomni_hook.parallel.loss` says which models have such a group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from veomni_hook.kernels.linear_cross_entropy.objective import Objective

__all__ = ["SHARED", "Group", "Shared", "part_of", "share_of"]


class Group(Protocol):
    """The processes that share rows."""

    @property
    def rank(self) -> int:
        """The place of this process."""

    @property
    def size(self) -> int:
        """How many processes there are."""

    def all_averaged(self, x: torch.Tensor) -> torch.Tensor:
        """Return the average over the processes; the gradient is averaged too, but for that of a loss."""


class Shared:
    """What finds the group of a model, the model being the argument; None: no model has one."""

    find: Callable[[object], Group | None] | None = None


SHARED = Shared()


def share_of(model: object, rows: int) -> Group | None:
    """Return the group that shares the ``rows`` of this model's loss, or None."""
    group = None if SHARED.find is None else SHARED.find(model)
    return None if group is None or rows < group.size else group


def part_of(
    group: Group, rows: torch.Tensor, target: torch.Tensor, objective: Objective
) -> tuple[torch.Tensor, torch.Tensor, Objective]:
    """Return this process's rows and targets, and the objective whose losses average to that of all rows.

    An average, because its gradient is 1: the loss's gradients, computed with it, need no second pass.

    Parts differ by at most one row. The divisor counts the labels of all rows, so a part without a label
    is a loss of 0.
    """
    start, end = (rows.shape[0] * rank // group.size for rank in (group.rank, group.rank + 1))
    items, weights = objective.num_items, objective.loss_weights
    if items is None:
        counts = target != objective.ignore_index
        items = counts.sum() if weights is None else weights.where(counts, 0).sum()
    weights = None if weights is None else weights[start:end]
    teacher = None if objective.teacher is None else objective.teacher.of_rows(slice(start, end))
    share = objective._replace(num_items=items / group.size, loss_weights=weights, teacher=teacher)
    return rows[start:end], target[start:end], share
