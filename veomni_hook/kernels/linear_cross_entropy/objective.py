"""The terms of a loss computed from hidden states, and the statistics it reports for each token.

With ``z = t(x @ weight.T + bias)`` in float32, ``lse = logsumexp(z)`` and ``e`` the label smoothing, the loss
of a row is

    (1 - e) * (lse - z[target]) + e * (lse - mean(z)) + z_loss * lse^2

and the loss is ``sum(w * losses) / items`` over the rows whose target is not ``ignore_index``. ``w`` is
``loss_weights`` (default 1). ``items`` is ``num_items``, by default the sum of ``w`` over those rows, so a
row with weight 0 counts as ignored. Label smoothing is torch's, z-loss that of PaLM (section 5).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from veomni_hook.kernels.linear_cross_entropy.transform import IDENTITY, Transform

__all__ = ["ACCUMULATE", "NOTHING", "Objective", "TokenStatistics", "Wanted"]

#: The precision in which chunks of the weight's gradient are summed: the weight's dtype, or float32.
ACCUMULATE = ("weight", "float32")


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

    def shaped(self, shape: Any) -> TokenStatistics:
        """Return the same statistics with rows in another shape."""
        return TokenStatistics(*(None if each is None else each.reshape(shape) for each in self))
