"""The terms of a loss computed from hidden states, and the statistics it reports for each token.

With ``z = t(x @ weight.T + bias)`` in float32, ``lse = logsumexp(z)`` and ``e`` the label smoothing, the loss
of a row is

    (1 - e) * (lse - z[target]) + e * (lse - mean(z)) + z_loss * lse^2

and the loss is ``sum(w * losses) / items`` over the rows whose target is not ``ignore_index``. ``w`` is
``loss_weights`` (default 1). ``items`` is ``num_items``, by default the sum of ``w`` over those rows, so a
row with weight 0 counts as ignored. Label smoothing is torch's, z-loss that of PaLM (section 5).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from veomni_hook.errors import KernelError

__all__ = ["ACCUMULATE", "IDENTITY", "NOTHING", "Objective", "TokenStatistics", "Transform", "Wanted"]

#: The precision in which chunks of the weight's gradient are summed: the weight's dtype, or float32.
ACCUMULATE = ("weight", "float32")


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
    """

    ignore_index: int = -100
    num_items: torch.Tensor | float | None = None
    transform: Transform = IDENTITY
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    loss_weights: torch.Tensor | None = None
    accumulate: str = "weight"

    def wrong(self) -> str | None:
        """Return what is invalid, or None."""
        for name in ("label_smoothing", "z_loss"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)):
                return f"{name} is a {type(value).__name__}, not a number"
        if not 0 <= self.label_smoothing <= 1:
            return f"label_smoothing is {self.label_smoothing}, not between 0 and 1"
        if self.accumulate not in ACCUMULATE:
            return f"accumulate is {self.accumulate!r}, not one of {ACCUMULATE}"
        weights = self.loss_weights
        if weights is not None and (weights.requires_grad or not weights.is_floating_point()):
            return "loss_weights are not floating-point numbers, or require a gradient"
        return self.transform.refuses()


class Wanted(NamedTuple):
    """Which `TokenStatistics` to compute besides a loss."""

    log_probs: bool = False
    entropy: bool = False
    predictions: bool = False


NOTHING = Wanted()


class TokenStatistics(NamedTuple):
    """Statistics of ``softmax(z)`` for each row; None: not requested.

    Attributes:
        log_probs: of the target, float32; 0 for ignored rows.
        entropy: in nats, float32; 0 for ignored rows.
        predictions: the token with the highest ``z`` (ties: the first), int64; ``ignore_index`` for ignored
            rows.
    """

    log_probs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    predictions: torch.Tensor | None = None

    def shaped(self, shape: Sequence[int]) -> TokenStatistics:
        """Return the same statistics with rows in another shape."""
        return TokenStatistics(*(None if tensor is None else tensor.reshape(shape) for tensor in self))
