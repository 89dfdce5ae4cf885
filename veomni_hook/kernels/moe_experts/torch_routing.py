"""Pairs of a token and one of its experts, sorted by expert: the order of rows in grouped products."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Chunk", "Pairs", "sorted_pairs"]


class Chunk(NamedTuple):
    """Neighbours among sorted pairs: all pairs of some experts.

    Attributes:
        places: where in ``top_k_index``, flat, they come from.
        rows: where they stand among all.
        experts: each with where its pairs stand among these.
    """

    places: Tensor
    rows: slice
    experts: list[tuple[int, slice]]


class Pairs(NamedTuple):
    """Places of ``top_k_index``, flat, in the order of their experts; equal ones in that of their places.

    Attributes:
        order: ``[tokens * k]`` int64; ids that no expert has stand before the first and after the last.
        starts: ``[E + 1]`` int64: expert e has ``order[starts[e]:starts[e + 1]]``.
        top_k: k.
    """

    order: Tensor
    starts: Tensor
    top_k: int

    def held(self) -> slice:
        """Return where the pairs of experts stand; waits for an accelerator."""
        return slice(int(self.starts[0]), int(self.starts[-1]))

    def chunks(self, rows: int) -> Iterator[Chunk]:
        """Yield all pairs of experts, of as many at once as have ``rows``; waits for an accelerator."""
        starts = self.starts.tolist()
        begin, experts = starts[0], list[tuple[int, slice]]()
        for expert, (first, end) in enumerate(pairwise(starts)):
            if first < end:
                experts.append((expert, slice(first - begin, end - begin)))
            if end - begin >= rows or (experts and end == starts[-1]):
                yield Chunk(self.order[begin:end], slice(begin, end), experts)
                begin, experts = end, []


def sorted_pairs(top_k_index: Tensor, experts: int) -> Pairs:
    """Sort ids ``[tokens, k]``; the same on any device, without waiting for it, and without atomics."""
    ids, order = torch.sort(top_k_index.reshape(-1), stable=True)
    numbers = torch.arange(experts + 1, device=ids.device, dtype=ids.dtype)
    return Pairs(order, torch.searchsorted(ids, numbers), top_k_index.shape[1])
