"""The terms of a loss computed from hidden states, and the statistics it reports for each token.

With ``z = t(x @ weight.T + bias)`` in float32, ``lse = logsumexp(z)`` and ``e`` the label smoothing, the loss
of a row is

    (1 - e) * (lse - z[target]) + e * (lse - mean(z)) + z_loss * lse^2

and the loss is ``sum(w * losses) / items`` over the rows whose target is not ``ignore_index``. ``w`` is
``loss_weights`` (default 1). ``items`` is ``num_items``, by default the sum of ``w`` over those rows, so a
row with weight 0 counts as ignored. Label smoothing is torch's, z-loss that of PaLM (section 5).

With a teacher, a row has a divergence ``KL``, too (`Teacher`), and its loss is ``(1 - d) * (...) + d * KL``,
where ``d`` is ``distillation`` and ``...`` is the loss above.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn import functional

from veomni_hook.errors import KernelError

__all__ = [
    "ACCUMULATE",
    "IDENTITY",
    "NOTHING",
    "OF_TEACHER",
    "Divergence",
    "Objective",
    "Teacher",
    "TokenStatistics",
    "Transform",
    "Wanted",
]

#: The precision in which chunks of the weight's gradient are summed: the weight's dtype, or float32.
ACCUMULATE = ("weight", "float32")
#: The fields of `TokenStatistics` for which there must be a teacher.
OF_TEACHER = ("distillation_losses", "student_mass", "teacher_mass")


class Transform(NamedTuple):
    """``softcap * tanh(dtype(logits) * scale / divisor / softcap)``; None skips a step."""

    dtype: torch.dtype | None = None
    scale: float | None = None
    divisor: float | None = None
    softcap: float | None = None

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the transformed ``logits``, rounded where upstream rounds."""
        if self.dtype is not None:
            logits = logits.to(self.dtype)
        if self.scale is not None:
            logits = logits * self.scale
        if self.divisor is not None:
            logits = logits / self.divisor
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits

    @property
    def factor(self) -> float:
        """The factor of logits before the cap."""
        scale = 1.0 if self.scale is None else self.scale
        return scale if self.divisor is None else scale / self.divisor

    def at(self, temperature: float, caller: str = "linear_cross_entropy") -> Transform:
        """Return this transform with its result divided by ``temperature``.

        A cap of ``c`` over ``T`` is a cap of ``c / T`` of logits that are scaled by ``1 / T``. An error names
        the ``caller``.

        Raises:
            KernelError: the temperature is not a positive number.
        """
        if isinstance(temperature, bool) or not isinstance(temperature, (int, float)) or not temperature > 0:
            tensor = isinstance(temperature, torch.Tensor)
            raise KernelError(
                f"temperature is {temperature!r}, not a {'Python' if tensor else 'positive'} number",
                where=caller,
                fix=f"pass a number above 0{', not a tensor' * tensor}; 1 leaves the logits as they are",
            )
        if temperature == 1:
            return self
        softcap = None if self.softcap is None else self.softcap / temperature
        return Transform(torch.float32, self.factor / temperature, None, softcap)

    def refuses(self) -> str | None:
        """Return why a kernel cannot apply this, or None."""
        for name in ("scale", "divisor", "softcap"):
            value = getattr(self, name)
            if not isinstance(value, (int, float, type(None))):
                return f"the {name} of the logits is a {type(value).__name__}, not a number"
        if self.dtype is not None and not self.dtype.is_floating_point:
            return f"logits are cast to {self.dtype}"
        return None


IDENTITY = Transform()


class Divergence(NamedTuple):
    """The last three fields of `TokenStatistics`."""

    losses: torch.Tensor
    student_mass: torch.Tensor
    teacher_mass: torch.Tensor


class Teacher(NamedTuple):
    """What a teacher says about each position: its ``k`` most probable tokens.

    With ``p`` its probabilities, and ``q`` the model's, of these tokens, the divergence of a position is
    ``KL = sum(p * (log(p) - log(q)))``; what is below ``log_prob_min_clamp`` there counts as that. Backends
    compute ``log(q)``, ``[rows, k]``, from their chunks of logits, and take its gradient. All the rest is in
    plain PyTorch: it is as small as ``k`` is beside the vocabulary.

    Attributes:
        topk_ids: ``[..., k]``, int64, one row for each label.
        topk_log_probs: ``[..., k]``, ``log(p)``; no gradient.
        log_prob_min_clamp: the lowest logarithm; None: no limit.
    """

    topk_ids: torch.Tensor
    topk_log_probs: torch.Tensor
    log_prob_min_clamp: float | None = None

    def shifted(self) -> Teacher:
        """Return what it says about the next label of each position; about that of the last, anything."""
        ids, log_probs = (functional.pad(each, (0, 0, 0, 1))[..., 1:, :] for each in self[:2])
        return self._replace(topk_ids=ids, topk_log_probs=log_probs)

    def rows(self) -> Teacher:
        """Return it with tensors ``[rows, k]``."""
        ids, log_probs = (tensor.flatten(0, -2) for tensor in (self.topk_ids, self.topk_log_probs))
        return self._replace(topk_ids=ids, topk_log_probs=log_probs)

    def of_rows(self, rows: slice) -> Teacher:
        """Return what it says about some of the rows."""
        return self._replace(topk_ids=self.topk_ids[rows], topk_log_probs=self.topk_log_probs[rows])

    def told(self, target: torch.Tensor, ignored: int) -> Teacher:
        """Return it on the device of ``target``, in float32.

        Ids of ignored rows may be any; they become 0.
        """
        counts = (target != ignored)[:, None]
        ids = self.topk_ids.to(target.device).where(counts, 0)
        log_probs = self.topk_log_probs.detach().to(target.device, torch.float32)
        return Teacher(ids, log_probs, self.log_prob_min_clamp)

    def divergence(self, at: torch.Tensor, counts: torch.Tensor) -> Divergence:
        """Return losses and masses ``[rows]``, 0 where not ``counts``, of a teacher that was `told`.

        ``at`` ``[rows, k]`` are the model's log-probabilities of the teacher's tokens; it may require a
        gradient.
        """
        log_p = self.topk_log_probs
        masses = (each.exp().sum(-1).where(counts, 0) for each in (at, log_p))
        log_p, at = self._clamped(log_p), self._clamped(at)
        p = log_p.exp()
        # A token that the teacher excludes (-inf) adds nothing.
        losses = (p * (log_p - at)).where(p > 0, 0).sum(-1).where(counts, 0)
        return Divergence(losses, *masses)

    def slopes(self, at: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the losses of `divergence` with respect to ``at``."""
        clamp = self.log_prob_min_clamp
        p = -self._clamped(self.topk_log_probs).exp()
        return p if clamp is None else p.where(at >= clamp, 0)

    def _clamped(self, log_probs: torch.Tensor) -> torch.Tensor:
        clamp = self.log_prob_min_clamp
        return log_probs if clamp is None else log_probs.clamp(min=clamp)

    def wrong(self, shape: Sequence[int] | None = None) -> str | None:
        """Return what is invalid for labels of ``shape`` (None: any), or None."""
        ids, log_probs = self.topk_ids, self.topk_log_probs
        if not isinstance(ids, torch.Tensor) or not isinstance(log_probs, torch.Tensor):
            return "topk_ids and topk_log_probs of a teacher are not both tensors"
        if ids.dtype is not torch.int64 or not log_probs.is_floating_point() or ids.shape != log_probs.shape:
            return (
                f"topk_ids are {ids.dtype} {[*ids.shape]}, topk_log_probs {log_probs.dtype} "
                f"{[*log_probs.shape]}: not int64 and floating-point numbers of one shape"
            )
        if shape is not None and ids.shape[:-1] != torch.Size(shape):
            return f"topk_ids of a teacher are {[*ids.shape]}, the labels {[*shape]}"
        if not isinstance(self.log_prob_min_clamp, (int, float, type(None))):
            return f"log_prob_min_clamp is a {type(self.log_prob_min_clamp).__name__}, not a number"
        return None


class Objective(NamedTuple):
    """The terms of a loss.

    Attributes:
        ignore_index: the target value of ignored rows.
        num_items: divisor of the sum, a number or a scalar tensor; None: see above.
        transform: ``t``.
        label_smoothing: ``e``, from 0 to 1.
        z_loss: the factor of ``lse^2``.
        loss_weights: ``[rows]``, no gradient; None: 1 each.
        accumulate: one of `ACCUMULATE`, the minimum precision.
        teacher: of every row.
        distillation: ``d``, from 0 to 1; without a teacher 0.
    """

    ignore_index: int = -100
    num_items: torch.Tensor | float | None = None
    transform: Transform = IDENTITY
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    loss_weights: torch.Tensor | None = None
    accumulate: str = "weight"
    teacher: Teacher | None = None
    distillation: float = 0.0

    def wrong(self) -> str | None:
        """Return what is invalid, or None."""
        for name in ("label_smoothing", "z_loss", "distillation"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)):
                return f"{name} is a {type(value).__name__}, not a number"
            if name != "z_loss" and not 0 <= value <= 1:
                return f"{name} is {value}, not between 0 and 1"
        if self.distillation and (self.teacher is None or self.label_smoothing):
            return f"distillation is set, but {'also label_smoothing' if self.teacher else 'no teacher'}"
        if self.accumulate not in ACCUMULATE:
            return f"accumulate is {self.accumulate!r}, not one of {ACCUMULATE}"
        weights = self.loss_weights
        if weights is not None and (weights.requires_grad or not weights.is_floating_point()):
            return "loss_weights are not floating-point numbers, or require a gradient"
        return self.transform.refuses() or (None if self.teacher is None else self.teacher.wrong())


class Wanted(NamedTuple):
    """Which `TokenStatistics` to compute besides a loss."""

    log_probs: bool = False
    entropy: bool = False
    predictions: bool = False
    distillation: bool = False


NOTHING = Wanted()


class TokenStatistics(NamedTuple):
    """Statistics of ``softmax(z)`` for each row; None: not requested.

    Attributes:
        log_probs: of the target, float32; 0 for ignored rows.
        entropy: in nats, float32; 0 for ignored rows.
        predictions: the token with the highest ``z`` (ties: the first), int64; ``ignore_index`` for ignored
            rows.
        distillation_losses: the divergence from the teacher, float32; 0 for ignored rows.
        student_mass: the probability of the teacher's tokens, float32; 0 for ignored rows.
        teacher_mass: the teacher's probability of them, float32, without a gradient; 0 for ignored rows.
    """

    log_probs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    predictions: torch.Tensor | None = None
    distillation_losses: torch.Tensor | None = None
    student_mass: torch.Tensor | None = None
    teacher_mass: torch.Tensor | None = None

    def shaped(self, shape: Sequence[int]) -> TokenStatistics:
        """Return the same statistics with rows in another shape."""
        return TokenStatistics(*(None if tensor is None else tensor.reshape(shape) for tensor in self))
