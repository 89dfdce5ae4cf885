"""What a loss straight from hidden states is asked for: its terms, and what it says of each token.

With ``z = t(x @ weight.T + bias)`` in float32, ``lse = logsumexp(z)`` and ``e`` the label smoothing, the loss
of a row is

    (1 - e) * (lse - z[target]) + e * (lse - mean(z)) + z_loss * lse^2

and the loss ``sum(w * losses) / items`` over the rows whose target is not ``ignore_index``: ``w`` is
``loss_weights`` (1 without), ``items`` is ``num_items`` or else the sum of ``w`` over those rows, so that a
weight of 0 is as good as a row to ignore. Label smoothing is torch's, z-loss that of PaLM (section 5).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from veomni_hook.kernels.linear_cross_entropy.transform import IDENTITY, Transform

__all__ = ["ACCUMULATE", "NOTHING", "Objective", "TokenStatistics", "Wanted"]

#: Where the weight's gradient is summed over chunks of rows: in its own dtype, or in float32.
ACCUMULATE = ("weight", "float32")


class Objective(NamedTuple):
    """The terms of a loss.

    Attributes:
        ignore_index: the target of rows that do not count.
        num_items: what the sum is divided by, a number or a tensor of one; None: see above.
        transform: ``t``.
        label_smoothing: ``e``, from 0 to 1.
        z_loss: the factor of ``lse^2``.
        loss_weights: ``[rows]``, no gradient; None: 1 each.
        accumulate: one of `ACCUMULATE`, the least precision; nothing rounds more than that.
    """

    ignore_index: int = -100
    num_items: torch.Tensor | float | None = None
    transform: Transform = IDENTITY
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    loss_weights: torch.Tensor | None = None
    accumulate: str = "weight"

    def wrong(self) -> str | None:
        """Return what no loss can have, or None."""
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
            return "loss_weights are no floating-point numbers, or want a gradient"
        return self.transform.refuses()


class Wanted(NamedTuple):
    """Which `TokenStatistics` to compute beside a loss."""

    log_probs: bool = False
    entropy: bool = False
    predictions: bool = False


NOTHING = Wanted()


class TokenStatistics(NamedTuple):
    """What ``softmax(z)`` of each row says; None: not asked for.

    Attributes:
        log_probs: of the target, float32; 0 where the target is ``ignore_index``.
        entropy: in nats, float32; 0 there.
        predictions: the token with the highest ``z`` (of equals the first), int64; ``ignore_index`` there.
    """

    log_probs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    predictions: torch.Tensor | None = None

    def shaped(self, shape: Any) -> TokenStatistics:
        """Return the same for rows in another shape."""
        return TokenStatistics(*(None if each is None else each.reshape(shape) for each in self))
