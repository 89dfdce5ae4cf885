"""Loss options that a training loop sets for the models it calls, and the token statistics it gets back.

    with loss_options(label_smoothing=0.1, log_probs=True) as report:
        loss = model(**batch).loss
    report.log_probs

Position ``i`` of a report describes the label that the logits at ``i`` predict. It is aligned with
``shift_labels``; with ``labels``, position ``i`` describes label ``i + 1``. ``loss_weights`` correspond to
``labels`` (or to ``shift_labels`` if given) position by position, and are shifted with them.

Options that change the loss are never silently dropped: if the upstream code would have to compute it, an
error is raised. Options apply to the thread (or asyncio task) that calls the model. Activation checkpointing
around a whole model recomputes its loss in backward, with the options active there: none, on a GPU.
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
    """The requested options; see `loss_options`."""

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    loss_weights: torch.Tensor | None = None
    accumulate: str = "weight"
    wanted: Wanted = NOTHING
    evaluation: bool = False

    @property
    def changed(self) -> str:
        """The names of the options that change the loss, separated by commas."""
        return ", ".join(
            name
            for name in ("label_smoothing", "z_loss", "loss_weights")
            if (value := getattr(self, name)) is not None
            and not (isinstance(value, (int, float)) and not value)
        )


class LossReport:
    """Statistics of the last loss in a `loss_options` block; reading unavailable ones raises KernelError.

    Tensors have the shape of the labels and no gradient.
    """

    def __init__(self) -> None:
        self._found = TokenStatistics()
        self._target: torch.Tensor | None = None
        self._counts: torch.Tensor | None = None
        self._why = "no model has computed a fused loss: is its modeling code patched, and the op not eager?"
        self.fused = 0

    @property
    def log_probs(self) -> torch.Tensor:
        """The log-probability of each label, float32; 0 for ignored labels."""
        return self._read("log_probs")

    @property
    def entropy(self) -> torch.Tensor:
        """The entropy (in nats) of each position's distribution, float32; 0 for ignored labels."""
        return self._read("entropy")

    @property
    def predictions(self) -> torch.Tensor:
        """The most probable token at each position, int64; the ignore index for ignored labels."""
        return self._read("predictions")

    @property
    def accuracy(self) -> torch.Tensor:
        """The share of positions, without ignored ones, predicted correctly; does not synchronise."""
        predictions = self._read("predictions", asked_as="accuracy")
        counts, target = self._counts, self._target
        assert counts is not None and target is not None  # noqa: S101 - set together with the statistics
        return ((predictions == target) & counts).sum() / counts.sum()

    def take(self, found: TokenStatistics, target: torch.Tensor, ignore_index: int, shape: Any) -> None:
        """Store the statistics of a fused loss for ``target`` ``[rows]``; ``shape`` is that of the labels."""
        self._found = found.shaped(shape)
        self._target = target.reshape(shape)
        self._counts = self._target != ignore_index
        self._why = "it was not requested"
        self.fused += 1

    def refuse(self, reason: str) -> None:
        """Record that the upstream code computed the last loss, and why."""
        self._found, self._target, self._counts = TokenStatistics(), None, None
        self._why = f"upstream's code computed the loss: {reason}"

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
    """The active options, and the report to fill."""

    options: LossOptions
    report: LossReport


class _Open:
    """The process's open `loss_options` blocks; compiled code cannot query those of its thread."""

    def __init__(self) -> None:
        self._blocks = 0
        #: Compiled code guards on this flag; it would treat a number as dynamic.
        self.any = False

    def add(self, blocks: int) -> None:
        """Count blocks that begin (positive) or end (negative)."""
        self._blocks += blocks
        self.any = self._blocks > 0


OPEN = _Open()

_ACTIVE: ContextVar[Active | None] = ContextVar("veomni_hook_loss_options", default=None)


def active() -> Active | None:
    """Return the options active here, or None."""
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
    """Set options for the losses that patched models compute in this block; yield a `LossReport` of the last.

    Args:
        label_smoothing: as in ``torch.nn.functional.cross_entropy``.
        z_loss: factor of each position's squared logsumexp, averaged like the loss.
        loss_weights: a factor for the loss of each label, in the shape of the labels; without
            ``num_items_in_batch`` the sum is divided by the sum of the weights.
        accumulate: ``"float32"`` sums the gradient of the head's weight in float32, ``"weight"`` in the
            weight's dtype.
        log_probs: report the log-probability of each label.
        entropy: report the entropy of each position.
        predictions: report the most probable tokens and the accuracy.
        evaluation: also fuse the loss in eval mode and without gradients.

    Raises:
        KernelError: a value is not valid; ``label_smoothing``, ``z_loss`` or ``loss_weights`` are set, but
            the upstream code would have to compute the loss; or no fused loss used them.
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
            " linear_cross_entropy; models under torch.compile do not support options",
        )


def refused(model: Any, reason: str) -> None:
    """Record that upstream code computes the loss of ``model``; raise KernelError if options change it."""
    held = active()
    if held is None:
        return
    held.report.refuse(reason)
    if held.options.changed:
        raise KernelError(
            f"{held.options.changed} are not available: upstream's code computes this loss, because {reason}",
            where=type(model).__name__,
            fix="remove the cause, or do not use loss_options",
        )
