"""What a training loop asks of the losses of the models that it calls, and what these tell it of each token.

    with loss_options(label_smoothing=0.1, log_probs=True) as report:
        loss = model(**batch).loss
    report.log_probs

Position ``i`` of a report speaks of the label that logits at ``i`` predict: it is aligned with
``shift_labels``, which for ``labels`` means that label ``i + 1`` is described at ``i``. ``loss_weights``
belong to ``labels`` (or to ``shift_labels`` where these are given) position by position, and are shifted with
them.

Options that change the loss are never dropped: where upstream's code would have to compute it, that is an
error. They are those of the thread (the asyncio task) that calls the model. An activation checkpoint around a
whole model computes its loss again in backward, with the options in force there: none, on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from veomni_hook.errors import KernelError
from veomni_hook.kernels.linear_cross_entropy.objective import NOTHING, Objective, TokenStatistics, Wanted

__all__ = ["OPEN", "Active", "LossOptions", "LossReport", "active", "loss_options", "refused"]


@dataclass(frozen=True)
class LossOptions:
    """What is asked for; see `loss_options`."""

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    loss_weights: torch.Tensor | None = None
    accumulate: str = "weight"
    wanted: Wanted = NOTHING
    evaluation: bool = False

    @property
    def changed(self) -> str:
        """The names of those that make another loss than upstream's, with commas."""
        return ", ".join(
            name
            for name in ("label_smoothing", "z_loss", "loss_weights")
            if (value := getattr(self, name)) is not None
            and not (isinstance(value, (int, float)) and not value)
        )


class LossReport:
    """What the last loss in a block of `loss_options` told; reading what it did not tell is a KernelError.

    Tensors have the shape of the labels, and no gradient.
    """

    def __init__(self) -> None:
        self._found = TokenStatistics()
        self._target: torch.Tensor | None = None
        self._counts: torch.Tensor | None = None
        self._why = "no model has computed a fused loss: is its modeling code patched, and the op not eager?"
        self.fused = 0

    @property
    def log_probs(self) -> torch.Tensor:
        """The log-probability of each label, float32; 0 where a label is ignored."""
        return self._read("log_probs")

    @property
    def entropy(self) -> torch.Tensor:
        """The entropy (in nats) of each position's distribution, float32; 0 where a label is ignored."""
        return self._read("entropy")

    @property
    def predictions(self) -> torch.Tensor:
        """The most probable token at each position, int64; the ignore index where a label is ignored."""
        return self._read("predictions")

    @property
    def accuracy(self) -> torch.Tensor:
        """The share of positions that count whose most probable token is the label, not waited for."""
        predictions = self._read("predictions", asked_as="accuracy")
        counts, target = self._counts, self._target
        assert counts is not None and target is not None  # noqa: S101 - set together with the statistics
        return ((predictions == target) & counts).sum() / counts.sum()

    def take(self, found: TokenStatistics, target: torch.Tensor, ignore_index: int, shape: Any) -> None:
        """Hold what a fused loss found for ``target`` ``[rows]``; ``shape`` is that of the labels."""
        self._found = found.shaped(shape)
        self._target = target.reshape(shape)
        self._counts = self._target != ignore_index
        self._why = "it was not asked for"
        self.fused += 1

    def refuse(self, reason: str) -> None:
        """Hold that the upstream code computed the last loss, and why."""
        self._found, self._target, self._counts = TokenStatistics(), None, None
        self._why = f"the upstream code computed the loss: {reason}"

    def _read(self, name: str, asked_as: str = "") -> torch.Tensor:
        value: torch.Tensor | None = getattr(self._found, name)
        if value is None:
            raise KernelError(
                f"the report has no {asked_as or name}: {self._why}",
                where="loss_options",
                fix=f"pass {name}=True, and see veomni_hook.explain(model) for what computed the loss",
            )
        return value


class Active(NamedTuple):
    """The options in force, and where to report."""

    options: LossOptions
    report: LossReport


class _Open:
    """The blocks of `loss_options` that the process is in; compiled code cannot ask the thread's."""

    def __init__(self) -> None:
        self._blocks = 0
        #: A guard of compiled code, which would take a number for a dynamic one.
        self.any = False

    def add(self, blocks: int) -> None:
        """Count blocks that begin, or end."""
        self._blocks += blocks
        self.any = self._blocks > 0


OPEN = _Open()

_ACTIVE: ContextVar[Active | None] = ContextVar("veomni_hook_loss_options", default=None)


def active() -> Active | None:
    """Return the options in force here, or None."""
    return _ACTIVE.get()


@contextmanager
def loss_options(  # noqa: PLR0913 - one keyword an option
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    loss_weights: torch.Tensor | None = None,
    accumulate: str = "weight",
    log_probs: bool = False,
    entropy: bool = False,
    predictions: bool = False,
    evaluation: bool = False,
) -> Iterator[LossReport]:
    """Apply to the losses that patched models compute in this block, and return a `LossReport` of the last.

    Args:
        label_smoothing: as in ``torch.nn.functional.cross_entropy``.
        z_loss: a factor of the squared logsumexp of each position, averaged like the loss.
        loss_weights: a factor for the loss of each label, in the shape of the labels; without
            ``num_items_in_batch`` the sum is divided by that of the weights.
        accumulate: ``"float32"`` sums the gradient of the head's weight in that, ``"weight"`` in its dtype.
        log_probs: report the log-probability of each label.
        entropy: report the entropy of each position.
        predictions: report the most probable tokens, and the accuracy.
        evaluation: fuse the loss in eval mode and without gradients, too.

    Raises:
        KernelError: a value is not valid; the upstream code would have to compute a loss that
            ``label_smoothing``, ``z_loss`` or ``loss_weights`` change; or no fused loss took them.
    """
    wanted = Wanted(log_probs, entropy, predictions)
    options = LossOptions(label_smoothing, z_loss, loss_weights, accumulate, wanted, evaluation)
    wrong = Objective(
        label_smoothing=label_smoothing, z_loss=z_loss, loss_weights=loss_weights, accumulate=accumulate
    ).wrong()
    if wrong is not None:
        raise KernelError(wrong, where="loss_options", fix="see its documentation")
    report = LossReport()
    token = _ACTIVE.set(Active(options, report))
    OPEN.add(1)
    try:
        yield report
    finally:
        OPEN.add(-1)
        _ACTIVE.reset(token)
    if options.changed and not report.fused:
        raise KernelError(
            f"{options.changed} had no effect: no model computed a fused loss in this block",
            where="loss_options",
            fix="activate veomni_hook before the model's module is imported, and do not choose eager for"
            " linear_cross_entropy; a model under torch.compile knows no options",
        )


def refused(model: Any, reason: str) -> None:
    """Note that the upstream code computes the loss of ``model``; KernelError if another is asked for."""
    held = active()
    if held is None:
        return
    held.report.refuse(reason)
    if held.options.changed:
        raise KernelError(
            f"{held.options.changed} are not available: upstream's code computes this loss, because {reason}",
            where=type(model).__name__,
            fix="remove the reason, or leave loss_options",
        )
