"""Loss options that a training loop sets for the models it calls, and the token statistics it gets back.

    with loss_options(label_smoothing=0.1, log_probs=True) as report:
        loss = model(**batch).loss
    report.log_probs

    with loss_options(token_outputs=True, temperature=0.7):
        output = model(**batch)
    output.log_probs  # with a gradient

Position ``i`` of a report or field describes the label that the logits at ``i`` predict. It is aligned with
``shift_labels``; with ``labels``, position ``i`` describes label ``i + 1``. ``loss_weights`` correspond to
``labels`` (or to ``shift_labels`` if given) position by position, and are shifted with them; so does a
``teacher``.

Options that change the loss are never silently dropped: if the upstream code would have to compute it, an
error is raised. Options apply to the thread (or asyncio task) that calls the model. Activation checkpointing
around a whole model recomputes its loss in backward, with the options of the forward pass.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from veomni_hook.errors import KernelError
from veomni_hook.kernels.linear_cross_entropy import requested_call
from veomni_hook.kernels.linear_cross_entropy.objective import (
    IDENTITY,
    OF_TEACHER,
    Objective,
    Teacher,
    TokenStatistics,
    Wanted,
)
from veomni_hook.kernels.shared.history import History, following, in_backward

__all__ = [
    "EVALUATION",
    "NO_GRADIENTS",
    "OPEN",
    "READ",
    "READ_IN_EVALUATION",
    "SWITCHED_OFF",
    "TOKEN_OUTPUTS",
    "Active",
    "LossOptions",
    "LossReport",
    "active",
    "fields_of",
    "leave_to_upstream",
    "loss_options",
    "named",
    "note",
    "token_outputs_of",
]

#: Why upstream's code computes a loss although a kernel could.
EVALUATION = "the model is in eval mode, where callers read the logits"
NO_GRADIENTS = "gradients are disabled"
READ = "outputs.logits was read in a training step, so the forward computes the logits"
READ_IN_EVALUATION = "outputs.logits was read in evaluation, so the forward computes the logits there"

#: What to do where no model has asked for a kernel.
UNROUTED = (
    "pass `labels`; the model's loss must be routed (`veomni-hook list FAMILY`): veomni_hook has to be "
    "active when the model's module is imported"
)

_UNREAD = "do not read outputs.logits of this model, or pass token_outputs=True, for which this is no matter"
#: Said once for a model, with its class and the line that reads.
SWITCHED_OFF = (
    "%s: the fused loss is switched off from the next step on, because outputs.logits is read at %s; "
    f"{_UNREAD}"
)
#: What a user of `loss_options` can do about a reason, and about any other.
_OTHER_REMEDY = "remove the cause, or do not use loss_options"
_REMEDIES = {
    EVALUATION: "pass evaluation=True to loss_options",
    NO_GRADIENTS: "pass evaluation=True to loss_options",
    READ: _UNREAD,
    READ_IN_EVALUATION: _UNREAD,
}
#: The fields of token statistics, in the order in which outputs have them; with a teacher, OF_TEACHER follow.
TOKEN_OUTPUTS = ("log_probs", "entropy", "token_accuracy")
_PLURAL = ("loss_weights", "token_outputs")


@dataclass(frozen=True)
class LossOptions:
    """The requested options; see `loss_options`.

    ``objective`` has those of the loss: its transform is that of a model that does not transform logits, and
    its tensors have the shape of the labels.
    """

    objective: Objective
    temperature: float
    wanted: Wanted
    evaluation: bool
    token_outputs: tuple[str, ...]

    @property
    def changed(self) -> str:
        """The names of the options that change the loss or the output, separated by commas."""
        beside = ("token_outputs",) if self.token_outputs else ()
        return ", ".join((*self.changes_loss, *beside))

    @property
    def changes_loss(self) -> tuple[str, ...]:
        """The names of the options that change the loss."""
        objective = self.objective
        is_set = {
            "label_smoothing": objective.label_smoothing != 0,
            "z_loss": objective.z_loss != 0,
            "loss_weights": objective.loss_weights is not None,
            "temperature": self.temperature != 1,
            "distillation": objective.distillation != 0,
        }
        return tuple(name for name, is_given in is_set.items() if is_given)


def named(value: object, where: str, *, taught: bool = False) -> tuple[str, ...]:
    """Return the fields that ``value`` requests (True: all), in the order of outputs.

    ``taught``: there is a teacher.

    Raises:
        KernelError: ``value`` names something else; ``where`` is what has it.
    """
    every = (*TOKEN_OUTPUTS, *(OF_TEACHER if taught else ()))
    if isinstance(value, bool):
        return every if value else ()
    if not isinstance(value, (tuple, list, set, frozenset)) or not set(value) <= {*every}:
        raise KernelError(
            f"token_outputs is {value!r}, neither True nor some of {', '.join(every)}",
            where=where,
            fix="pass True, or a tuple of these names",
        )
    return tuple(name for name in every if name in value)


class LossReport:
    """Statistics of the last loss in a `loss_options` block; reading unavailable ones raises KernelError.

    Tensors have the shape of the labels and no gradient.
    """

    def __init__(self) -> None:
        self._found = TokenStatistics()
        self._target: torch.Tensor | None = None
        self._counts: torch.Tensor | None = None
        self._why, self._fix = "no model has computed a fused loss", UNROUTED
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

    def take(
        self, found: TokenStatistics | None, target: torch.Tensor, ignore_index: int, shape: Sequence[int]
    ) -> None:
        """Store the statistics of a fused loss for ``target`` ``[rows]``; ``shape`` is that of the labels."""
        found = TokenStatistics() if found is None else found
        kept = (None if tensor is None else tensor.detach() for tensor in found.shaped(shape))
        self._found = TokenStatistics(*kept)
        self._target = target.reshape(shape)
        self._counts = self._target != ignore_index
        self._why, self._fix = "it was not requested", ""
        self.fused += 1

    def refuse(self, reason: str) -> None:
        """Record that the upstream code computed the last loss, and why."""
        self._found, self._target, self._counts = TokenStatistics(), None, None
        self._why = f"upstream's code computed the loss: {reason}"
        self._fix = _REMEDIES.get(reason, _OTHER_REMEDY)

    def _read(self, name: str, asked_as: str = "") -> torch.Tensor:
        value: torch.Tensor | None = getattr(self._found, name)
        if value is None:
            raise KernelError(
                f"the report has no {asked_as or name}: {self._why}",
                where="loss_options",
                fix=self._fix or f"pass {name}=True",
            )
        return value


class Active(NamedTuple):
    """The active options, the report to fill, and the backward pass in which the block began (-1: none)."""

    options: LossOptions
    report: LossReport
    task: int = -1


#: The process's open `loss_options` blocks: compiled code cannot query those of its thread. It guards on
#: ``any``; a number it would treat as dynamic.
OPEN = SimpleNamespace(blocks=0, any=False)

_task = torch._C._current_graph_task_id
_ACTIVE: ContextVar[Active | None] = ContextVar("veomni_hook_loss_options", default=None)


def _gone(name: str) -> KernelError:
    return KernelError(
        f"a checkpoint computes a loss of {name} again whose options are no longer held",
        where="loss_options, in a backward pass",
        fix="run the backward pass before the next forward passes, or use checkpoints with "
        "use_reentrant=False",
    )


_PAST = History(_gone)


def active(model: Any = None) -> Active | None:
    """Return the options active here, or None.

    A call of ``model`` in a backward pass repeats one of a forward pass, and has the options of that, unless
    a block began in the same backward pass.
    """
    current = _ACTIVE.get()
    if model is None or not in_backward() or (current is not None and current.task == _task()):
        return current
    past: Active | None = _PAST.recall(model)
    return past


def note(model: Any, number: int, loss: torch.Tensor | None) -> None:
    """Note the options of a call of ``model`` that made ``loss`` (None: they were not used).

    ``number`` is `veomni_hook.kernels.shared.history.following` before the loss was computed.
    """
    held = _ACTIVE.get()
    if in_backward():
        return
    if held is None or loss is None:
        _PAST.passed(model, number)
    else:
        # The report is of the forward pass.
        _PAST.note(model, held._replace(report=LossReport()), loss, number)


@contextmanager
def loss_options(
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    loss_weights: torch.Tensor | None = None,
    accumulate: str = "weight",
    log_probs: bool = False,
    entropy: bool = False,
    predictions: bool = False,
    evaluation: bool = False,
    token_outputs: bool | Collection[str] = False,
    temperature: float = 1.0,
    teacher: Teacher | None = None,
    distillation: float = 0.0,
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
        token_outputs: give outputs the fields ``log_probs``, ``entropy`` and ``token_accuracy`` (True: all of
            them, or a tuple of names), float32 in the shape of the labels, 0 for ignored labels; the first
            two with gradients. ``evaluation`` is implied. ``token_accuracy`` is 1 where the most probable
            token is the label, else 0.
        temperature: divides the logits of the loss, the report and the fields; ``output.logits`` are the
            model's own.
        teacher: the most probable tokens of a teacher at each label. ``token_outputs`` may then name
            ``distillation_losses`` (with gradients), ``student_mass`` and ``teacher_mass``, too.
        distillation: the share of each label's loss, from 0 to 1, that is the divergence from the teacher.

    Raises:
        KernelError: a value is not valid; ``label_smoothing``, ``z_loss``, ``loss_weights``,
            ``token_outputs``, ``temperature`` or ``distillation`` are set, but the upstream code would have
            to compute the loss; or no fused loss used them.
    """
    fields = named(token_outputs, "loss_options", taught=teacher is not None)
    objective = Objective(
        transform=IDENTITY.at(temperature, "loss_options"), label_smoothing=label_smoothing, z_loss=z_loss,
        loss_weights=loss_weights, accumulate=accumulate, teacher=teacher, distillation=distillation,
    )  # fmt: skip
    if (wrong := objective.wrong()) is not None:
        raise KernelError(
            wrong, where="loss_options", fix="pass what help(veomni_hook.loss_options) describes"
        )
    wanted = Wanted(log_probs, entropy, predictions)
    options, report = LossOptions(objective, temperature, wanted, evaluation, fields), LossReport()
    token = _ACTIVE.set(Active(options, report, _task()))
    OPEN.blocks += 1
    OPEN.any = True
    try:
        yield report
    finally:
        OPEN.blocks -= 1
        OPEN.any = OPEN.blocks > 0
        _ACTIVE.reset(token)
    if options.changed and not report.fused:
        raise KernelError(
            f"{options.changed} had no effect: no model computed a fused loss in this block",
            where="loss_options",
            fix=f"{UNROUTED}; models under torch.compile do not support options",
        )


def token_outputs_of(model: object, *operands: Any) -> tuple[str, ...]:
    """Return the statistics that fields need, those that the call with these ``operands`` asks for included.

    Raises:
        KernelError: the config's ``token_outputs`` names something else.
    """
    asked = fields_of(model)
    more = requested_call.fields_of(requested_call.keywords_of(*operands))
    return tuple(name for name in (*TOKEN_OUTPUTS, *OF_TEACHER) if name in asked or name in more)


def fields_of(model: object) -> tuple[str, ...]:
    """Return the fields of the output that `loss_options`, or else the config of ``model``, ask for.

    Raises:
        KernelError: the config's ``token_outputs`` names something else.
    """
    request = None if torch.compiler.is_compiling() else active(model)
    if request is not None and request.options.token_outputs:
        return request.options.token_outputs
    value = getattr(getattr(model, "config", None), "token_outputs", None)
    return named(value, f"{type(model).__name__}.config.token_outputs") if value else ()


def leave_to_upstream(model: object, reason: str, *operands: object) -> None:
    """Tell `loss_options` that upstream computes the loss of ``model``, and why.

    Raises:
        KernelError: options change this loss, or the output has to have fields.
    """
    if not torch.compiler.is_compiling():
        request = active(model)
        note(model, following(), None)
        if request is not None:
            request.report.refuse(reason)
        if request is not None and (changed := request.options.changed):
            are = "are" if "," in changed or changed in _PLURAL else "is"
            raise KernelError(
                f"{changed} {are} not available: upstream's code computes this loss, because {reason}",
                where=type(model).__name__,
                fix=_REMEDIES.get(reason, _OTHER_REMEDY),
            )
    if names := token_outputs_of(model, *operands):
        raise KernelError(
            f"there is no {', '.join(names)}: upstream's code computes this loss, because {reason}",
            where=type(model).__name__,
            fix="remove the cause, or ask for no fields: by return_log_probs, or the config's token_outputs",
        )
