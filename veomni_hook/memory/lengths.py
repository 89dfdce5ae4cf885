"""The longest sequence that fits, and batches of other lengths than the one that is there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import sqrt
from typing import Any

import torch

__all__ = ["longest", "resized", "shape_of"]

#: Lengths are multiples of this, and predictions for them at most so many.
STEP, _TRIES = 64, 6
#: A length is good enough if it takes this share of the memory.
_CLOSE = 0.98


def shape_of(inputs: Mapping[str, Any]) -> tuple[int, int]:
    """Return the sequences of a batch and the tokens of each: of its token ids, or first tensor with rows."""
    tensors = [value for value in inputs.values() if isinstance(value, torch.Tensor) and value.ndim > 1]
    ids = inputs.get("input_ids")
    rows, tokens = (ids if isinstance(ids, torch.Tensor) else tensors[0]).shape[:2]
    return int(rows), int(tokens)


def resized(inputs: Mapping[str, Any], length: int) -> dict[str, Any]:
    """Return a batch of ``length``: what has the batch's length is cut, repeated, or counted on."""
    (_, now), batch = shape_of(inputs), dict(inputs)
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor):
            for dim in range(1, value.ndim):
                if value.shape[dim] == now:
                    batch[name] = _longer(batch[name], dim, length)
    return batch


def _longer(value: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    now = value.shape[dim]
    places = torch.arange(length, device=value.device)
    counted = torch.arange(now, device=value.device)
    if not value.dtype.is_floating_point and dim == value.ndim - 1 and bool((value == counted).all()):
        return places.to(value.dtype).expand(*value.shape[:-1], length).contiguous()
    return value.index_select(dim, places % now)


def longest(peak: Callable[[int], int], start: int, capacity: int) -> int:
    """Return the longest sequence whose peak is at most ``capacity``; 0 if the shortest takes more.

    Memory grows with the length by a line, or by a parabola where masks are dense. So the curve through
    lengths that were predicted says which to predict next.

    Args:
        peak: the peak at a length, a multiple of `STEP`.
        start: a length near those of the user.
        capacity: bytes.
    """
    known = {STEP: peak(STEP)}
    if known[STEP] > capacity:
        return 0
    guess = max(2 * STEP, start // STEP * STEP)
    for _ in range(_TRIES):
        known[guess] = peak(guess)
        below = max(length for length in known if known[length] <= capacity)
        above = min((length for length in known if known[length] > capacity), default=None)
        if known[below] >= _CLOSE * capacity or above == below + STEP:
            break
        guess = max(below + STEP, int(_where(known, capacity)) // STEP * STEP)
        if above is not None:
            guess = min(guess, above - STEP)
    return below


def _where(known: Mapping[int, int], capacity: int) -> float:
    """Return where the curve through the known lengths whose peaks are the closest reaches ``capacity``."""
    nearest = sorted(known, key=lambda length: abs(known[length] - capacity))[:3]
    zero, one, *others = nearest
    slope = (known[one] - known[zero]) / (one - zero)
    # Newton's form: peak = known[zero] + slope * far + bend * far * (far - (one - zero)).
    bend = sum(((known[two] - known[one]) / (two - one) - slope) / (two - zero) for two in others)
    linear, missing = slope - bend * (one - zero), capacity - known[zero]
    root = linear * linear + 4 * bend * missing
    if bend <= 0 or root < 0:
        return zero + missing / max(slope, 1.0)
    return zero + (sqrt(root) - linear) / (2 * bend)
