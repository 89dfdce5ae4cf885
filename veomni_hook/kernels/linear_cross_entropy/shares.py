"""A loss whose rows several processes share: each computes the loss of its rows, and the losses are averaged.

All of them have all rows, because the layers' output was gathered; without this, all would compute the same
loss. Where nothing else needs the gradient of all rows, a process takes those that it had before the gather.
`veomni_hook.parallel.loss` says which models have such a group, and which rows these are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from veomni_hook.kernels.linear_cross_entropy.objective import Objective

__all__ = ["SHARED", "Group", "Part", "Shared", "own_positions", "part_of", "share_of"]


class Group(Protocol):
    """The processes that share rows."""

    @property
    def rank(self) -> int:
        """The place of this process."""

    @property
    def size(self) -> int:
        """How many processes there are."""

    def own_positions(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """Return what of ``[batch, positions, hidden]`` this process had before the gather, or None."""

    def own_part(self, x: torch.Tensor) -> torch.Tensor:
        """Return this process's positions of ``[batch, positions]``."""

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


class Part(NamedTuple):
    """A loss of some positions: of all (no group), or of those that a process had before the gather.

    The average over the group is the loss of all.
    """

    group: Group | None
    hidden_states: torch.Tensor
    target: torch.Tensor
    objective: Objective


def own_positions(model: object, whole: Part) -> Part:
    """Return the loss of this process's positions of ``[batch, positions, hidden]``, or ``whole``."""
    _, hidden_states, target, objective = whole
    group = None if SHARED.find is None or objective.teacher is not None else SHARED.find(model)
    own = None if group is None else group.own_positions(hidden_states)
    if group is None or own is None or target.numel() != hidden_states.shape[:2].numel():
        return whole

    def part(x: torch.Tensor) -> torch.Tensor:
        return group.own_part(x.view(hidden_states.shape[:2])).flatten()

    return Part(group, own, part(target), _share(objective, target, group, part))


def part_of(
    group: Group, rows: torch.Tensor, target: torch.Tensor, objective: Objective
) -> tuple[torch.Tensor, torch.Tensor, Objective]:
    """Return this process's rows and targets, and the objective whose losses average to that of all rows.

    Parts differ by at most one row. The divisor counts the labels of all rows, so a part without a label
    is a loss of 0.
    """
    start, end = (rows.shape[0] * rank // group.size for rank in (group.rank, group.rank + 1))
    teacher = None if objective.teacher is None else objective.teacher.of_rows(slice(start, end))
    share = _share(objective, target, group, lambda x: x[start:end])
    return rows[start:end], target[start:end], share._replace(teacher=teacher)


def _share(
    objective: Objective, target: torch.Tensor, group: Group, part: Callable[[torch.Tensor], torch.Tensor]
) -> Objective:
    """Return the objective of a part of the rows.

    Losses are averaged, because an average's gradient is 1: those that are computed with the loss need no
    second pass.
    """
    items, weights = objective.num_items, objective.loss_weights
    if items is None:
        counts = target != objective.ignore_index
        items = counts.sum() if weights is None else weights.where(counts, 0).sum()
    weights = None if weights is None else part(weights)
    return objective._replace(num_items=items / group.size, loss_weights=weights)
