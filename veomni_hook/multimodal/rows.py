"""Rows of two kinds of features in the order of their tokens, without a number read from the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from veomni_hook.kernels.shared.operand_checks import not_plain
from veomni_hook.multimodal.counts import asserts

__all__ = ["joined"]

#: Of each layer, whole or in parts.
_Features = Sequence[torch.Tensor | Sequence[torch.Tensor]]


def joined(
    visual: torch.Tensor, first: tuple[torch.Tensor, _Features], second: tuple[torch.Tensor, _Features]
) -> list[torch.Tensor] | None:
    """Return each pair of features as one tensor in the order of tokens; None: upstream's code must run.

    Args:
        visual: bool ``[batch, positions]``: tokens of either kind.
        first: their mask, of the same shape, and a sequence of features ``[rows, H]``, whole or in parts.
        second: the same of the other kind.

    Returns:
        Tensors ``[rows of both, H]``, in the dtype of the first kind. That there are as many rows as tokens
        is asserted on the device.
    """
    (mask, features), (other_mask, other_features) = first, second
    if not asserts(visual) or not_plain(visual, mask, other_mask) is not None:
        return None
    pairs = [(_whole(one), _whole(other)) for one, other in zip(features, other_features, strict=True)]
    if not pairs or any(len({len(pair[at]) for pair in pairs}) > 1 for at in (0, 1)):
        return None
    order = _order(visual, mask, other_mask, len(pairs[0][0]), len(pairs[0][1]))
    return [torch.cat((one, other.to(one.dtype))).index_select(0, order) for one, other in pairs]


def _whole(features: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
    return features if isinstance(features, torch.Tensor) else torch.cat(tuple(features), dim=0)


def _order(
    visual: torch.Tensor, mask: torch.Tensor, other: torch.Tensor, rows: int, others: int
) -> torch.Tensor:
    """Return, for each token of either kind, its row among those of the first kind and then of the other."""
    mask, other, visual = (flags.flatten() for flags in (mask, other, visual))
    counts, other_counts, tokens = (flags.cumsum(0) for flags in (mask, other, visual))
    fits = (counts[-1] == rows) & (other_counts[-1] == others) & (tokens[-1] == rows + others)
    torch._assert_async(fits, "the numbers of visual tokens and of features differ")
    row = torch.where(other, rows + other_counts - 1, counts - 1)
    # Positions of text go to one more place.
    place = torch.where(visual, tokens - 1, rows + others).clamp_(max=rows + others)
    return row.new_zeros(rows + others + 1).scatter_(0, place, row)[:-1].clamp_(0, max(rows + others - 1, 0))
