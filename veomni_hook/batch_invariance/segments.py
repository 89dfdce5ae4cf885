"""Which keys the queries of an attention mask see, as segments: a sample of a row, a window, a padded row."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch

from veomni_hook.errors import KernelError

__all__ = ["Segment", "of_mask", "without_mask"]


class Segment(NamedTuple):
    """Queries that see keys from one on.

    Attributes:
        row: in the batch.
        queries, keys: first and one past the last.
        causal: the last query sees all keys, the one before it one fewer, and so on; else each sees all.
        window: how many keys a query sees at most; 0: no limit.
    """

    row: int
    queries: tuple[int, int]
    keys: tuple[int, int]
    causal: bool
    window: int = 0


def without_mask(batch: int, queries: int, keys: int, *, causal: bool) -> tuple[Segment, ...]:
    """Return a segment for each row of a batch without a mask."""
    return tuple(Segment(row, (0, queries), (0, keys), causal) for row in range(batch))


def of_mask(mask: torch.Tensor) -> tuple[Segment, ...]:
    """Return the segments of a mask, ``[batch, 1, queries, keys]`` on a CPU: true, or 0, is visible.

    Queries that see no key are in no segment.

    Raises:
        KernelError: the mask adds other numbers than 0 and the smallest, heads have masks of their own, or
            the keys of a query have gaps.
    """
    visible = _visible(mask)
    counts = visible.sum(-1)
    first = visible.int().argmax(-1)
    last = visible.shape[-1] - 1 - visible.flip(-1).int().argmax(-1)
    if not ((counts == last - first + 1) | (counts == 0)).all():
        raise _unfit("the keys that a query sees have gaps")
    segments: list[Segment] = []
    for row, (count, start, end) in enumerate(
        zip(counts.tolist(), first.tolist(), last.tolist(), strict=True)
    ):
        segments += _of_row(row, count, start, end)
    return tuple(segments)


def _visible(mask: torch.Tensor) -> torch.Tensor:
    if mask.dim() != 4 or (mask.shape[1] > 1 and not (mask == mask[:, :1]).all()):
        raise _unfit(f"a mask of shape {[*mask.shape]} is not one for all heads")
    shared = mask[:, 0]
    if shared.dtype is torch.bool:
        return shared
    if not ((shared == 0) | (shared <= torch.finfo(shared.dtype).min)).all():
        raise _unfit("the mask adds other numbers than 0 and -inf to the scores")
    return shared == 0


def _of_row(row: int, counts: list[int], first: list[int], last: list[int]) -> list[Segment]:
    """Cut a row where a query does not continue what the one before it has begun."""
    cuts, kind = [0], None
    for query in range(1, len(counts)):
        step = (first[query] - first[query - 1], last[query] - last[query - 1])
        # A window moves its first key, too, and is full then.
        known = {(0, 1): "grows", (0, 0): "stands", (1, 1): "slides"}.get(step)
        kept = kind in (None, known) or (kind, known) == ("grows", "slides")
        if counts[query] and counts[query - 1] and known and kept:
            kind = known
        else:
            cuts.append(query)
            kind = None
    segments = []
    for begin, end in pairwise([*cuts, len(counts)]):
        if counts[begin]:
            slides = first[end - 1] != first[begin]
            causal = last[end - 1] != last[begin] or end - begin == 1
            window = counts[end - 1] if slides else 0
            segments.append(Segment(row, (begin, end), (first[begin], last[end - 1] + 1), causal, window))
    return segments


def _unfit(what: str) -> KernelError:
    return KernelError(
        f"attention cannot be batch-invariant: {what}",
        where="deterministic=batch_invariant",
        fix="use a causal, padded, packed or sliding mask, or leave the setting out",
    )
