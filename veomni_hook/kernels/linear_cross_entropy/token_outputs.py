"""Log-probabilities, entropy and accuracy of each token as fields of a model's output, with gradients.

A model is asked for them by `loss_options`, or by the field ``token_outputs`` of its config, which compiled
code reads, too. The head computes them with the loss, in one vector ``[1 + fields * rows]``: hooks of FSDP2
and accelerate, which run around the head, then see one tensor, and a backward pass from any of the fields
runs them.

The loss is ``sum(w * -log_probs) / items`` of the same pass, so that backward recomputes the logits once for
the loss and the fields together (with a teacher, of ``distillation_losses``, too). With label smoothing or
z-loss it needs a pass of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn import functional

from veomni_hook.kernels.linear_cross_entropy.autograd import on_device
from veomni_hook.kernels.linear_cross_entropy.chunks import divisor
from veomni_hook.kernels.linear_cross_entropy.objective import (
    NOTHING,
    OF_TEACHER,
    Objective,
    TokenStatistics,
    Wanted,
)
from veomni_hook.kernels.linear_cross_entropy.shares import Group, part_of

__all__ = ["fields", "packed", "values", "wanted_for"]

_WITHOUT_GRADIENT = ("token_accuracy", "student_mass", "teacher_mass")


def wanted_for(names: tuple[str, ...], beside: Wanted, *, distilled: bool = False) -> Wanted:
    """Return the statistics that the fields ``names`` and the loss need, and those in ``beside``.

    ``distilled``: the loss needs the divergence from a teacher.
    """
    return Wanted(
        True,
        "entropy" in names or beside.entropy,
        "token_accuracy" in names or beside.predictions,
        distilled or any(name in names for name in OF_TEACHER),
    )


def packed(
    compute: Callable[..., tuple[torch.Tensor, TokenStatistics]],
    statistics: Callable[..., TokenStatistics],
    call: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor, Objective],
    wanted: Wanted,
    names: tuple[str, ...],
    group: Group | None = None,
) -> tuple[torch.Tensor, TokenStatistics]:
    """Return the loss and the fields as one float32 vector ``[1 + fields * rows]``, and the statistics.

    Args:
        compute: `reference.loss_and_statistics`, of a backend.
        statistics: `reference.token_statistics`, of the same backend.
        call: rows ``[rows, hidden]``, weight, bias, target ``[rows]`` and objective.
        wanted: the statistics to compute.
        names: the fields.
        group: processes that have the same rows; each computes its part (the statistics returned are those).
    """
    rows, weight, bias, target, objective = call
    before, number = 0, target.shape[0]
    if group is not None:
        before = number * group.rank // group.size
        rows, target, objective = part_of(group, rows, target, objective)
    of_rows = statistics(rows, weight, bias, target, objective, wanted)
    if objective.label_smoothing or objective.z_loss:
        loss = compute(rows, weight, bias, target, objective, NOTHING)[0]
    else:
        loss = _mean(of_rows, target, objective)
    columns = [*values(of_rows, target, objective.ignore_index, names, target.shape).values()]
    if group is not None:
        after = number - before - target.shape[0]
        columns = [functional.pad(group.size * column, (before, after)) for column in columns]
    vector = torch.cat([loss.reshape(1), *columns])
    return vector if group is None else group.all_averaged(vector), of_rows


def values(
    found: TokenStatistics, target: torch.Tensor, ignored: int, names: tuple[str, ...], shape: Sequence[int]
) -> dict[str, torch.Tensor]:
    """Return the fields ``names``, float32 in ``shape``, of the statistics of the targets ``[rows]``."""
    every = {name: getattr(found, name) for name in ("log_probs", "entropy", *OF_TEACHER)}
    if found.predictions is not None:
        every["token_accuracy"] = (found.predictions == target) & (target != ignored)
    return {name: value.float().reshape(shape) for name in names if (value := every[name]) is not None}


def _mean(statistics: TokenStatistics, target: torch.Tensor, objective: Objective) -> torch.Tensor:
    """Return the loss that `objective` defines, without smoothing and z-loss."""
    assert statistics.log_probs is not None  # noqa: S101 - `wanted_for` asks for them
    weights = objective.loss_weights
    items, _ = divisor(target, on_device(objective.num_items, target.device), weights, objective.ignore_index)
    losses = -statistics.log_probs
    if statistics.distillation_losses is not None:
        losses = losses.lerp(statistics.distillation_losses, objective.distillation)
    if weights is not None:
        losses = (losses * weights.to(losses)).where(target != objective.ignore_index, 0)
    return losses.sum() / items


def fields(
    vector: torch.Tensor, names: tuple[str, ...], shape: Sequence[int], num_items: torch.Tensor | float | None
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss, in the shape of ``num_items``, and the fields, ``shape`` each, that `packed` joined.

    None is a view: a caller may change each in place, and FSDP2 would lose its hook of a view.
    """
    columns = vector[1:].reshape(len(names), *shape)
    fields = {
        name: columns[place].detach().clone() if name in _WITHOUT_GRADIENT else columns[place].clone()
        for place, name in enumerate(names)
    }
    loss = vector[0].reshape(num_items.shape if isinstance(num_items, torch.Tensor) else ())
    return loss.clone(), fields
