"""Sorts pairs of a token and one of its experts by expert: the order of rows in grouped products."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Chunk", "Pairs", "assigned", "sorted_pairs"]


def assigned(ids: Tensor, num_experts: int) -> int:
    """Return how many of ``ids`` are experts."""
    return int(((ids >= 0) & (ids < num_experts)).sum())


class Chunk(NamedTuple):
    """A contiguous part of the sorted pairs: all pairs of some experts.

    Attributes:
        places: their positions in the flattened ``top_k_index``.
        rows: their positions among all sorted pairs.
        experts: each expert with the positions of its pairs in this chunk.
    """

    places: Tensor
    rows: slice
    experts: list[tuple[int, slice]]


class Pairs(NamedTuple):
    """Places of the flattened ``top_k_index``, stably sorted by expert.

    Attributes:
        order: ``[tokens * k]`` int64; ids without an expert come before the first and after the last.
        starts: ``[E + 1]`` int64: expert e has ``order[starts[e]:starts[e + 1]]``.
        top_k: k.
    """

    order: Tensor
    starts: Tensor
    top_k: int

    def held(self) -> slice:
        """Return the range of pairs that have an expert; synchronises on an accelerator."""
        return slice(int(self.starts[0]), int(self.starts[-1]))

    def chunks(self, rows: int) -> Iterator[Chunk]:
        """Yield pairs in chunks of whole experts with about ``rows`` rows; synchronises on an accelerator."""
        starts = self.starts.tolist()
        begin, experts = starts[0], list[tuple[int, slice]]()
        for expert, (first, end) in enumerate(pairwise(starts)):
            if first < end:
                experts.append((expert, slice(first - begin, end - begin)))
            if end - begin >= rows or (experts and end == starts[-1]):
                yield Chunk(self.order[begin:end], slice(begin, end), experts)
                begin, experts = end, []


def sorted_pairs(top_k_index: Tensor, experts: int) -> Pairs:
    """Sort ids ``[tokens, k]``; the same result on any device, without synchronising or atomics."""
    ids, order = torch.sort(top_k_index.reshape(-1), stable=True)
    numbers = torch.arange(experts + 1, device=ids.device, dtype=ids.dtype)
    return Pairs(order, torch.searchsorted(ids, numbers), top_k_index.shape[1])
