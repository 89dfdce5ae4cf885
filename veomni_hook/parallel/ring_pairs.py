"""Which queries of one process of a ring see which keys of another, exactly as upstream's mask says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

__all__ = ["Pair", "Pairs"]


class Pair(NamedTuple):
    """Queries of one process and keys of one process.

    Attributes:
        queries: where the queries are among those of their process: the first, and how many.
        keys: the same of the keys.
        mask: of these queries and keys, ``[batch or 1, heads or 1, queries or 1, keys]``; None: all is visible.
        triangle: a query sees the keys up to its own place.
    """

    queries: tuple[int, int]
    keys: tuple[int, int]
    mask: torch.Tensor | None = None
    triangle: bool = False


@dataclass(frozen=True)
class Pairs:
    """How positions lie in a ring, and what sees what.

    Attributes:
        size: how many processes there are.
        length: how many positions each of them has; the last ones may be copies.
        full: how many positions are no copies.
        mask: of all of them, ``[batch or 1, heads or 1, full or 1, full]``; or None.
        causal: without a mask, a position sees those up to itself; else it sees all.
    """

    size: int
    length: int
    full: int
    mask: torch.Tensor | None
    causal: bool

    @property
    def balanced(self) -> bool:
        """Whether processes have the positions that `veomni_hook.parallel.ring.mirrored` gives them.

        With a mask each computes all pairs: what it hides is unknown on the host.
        """
        return self.causal and self.mask is None

    def of(self, queries: int, keys: int) -> Iterator[Pair]:
        """Yield what process ``queries`` computes with the keys of process ``keys``."""
        for query in self._pieces(queries):
            for key in self._pieces(keys):
                if (pair := self._pair(query, key)) is not None:
                    yield pair

    def _pieces(self, rank: int) -> list[tuple[int, int, int]]:
        """Return the runs of positions of a process: their place in it, their first position, their number."""
        length, start = self.length, rank * self.length
        if not self.balanced:
            return [(0, start, length)]
        half = length // 2
        other = (self.size - 1 - rank) * length + half
        return [piece for piece in ((0, start, half), (half, other, length - half)) if piece[2]]

    def _pair(self, query: tuple[int, int, int], key: tuple[int, int, int]) -> Pair | None:
        place, first, queries = query
        at, start, keys = key
        if self.balanced:  # nobody sees copies but copies: they are the last
            if first < start:
                return None
            return Pair((place, queries), (at, keys), None, first == start)
        keys = min(keys, self.full - start)
        if keys <= 0:
            return None
        mask = self.mask
        if mask is not None:
            mask = mask.narrow(3, start, keys)
            if mask.shape[2] > 1:
                # Copies see what the last position sees.
                rows = torch.arange(first, first + queries, device=mask.device)
                mask = mask.index_select(2, rows.clamp(max=self.full - 1))
        return Pair((place, queries), (at, keys), mask, False)
