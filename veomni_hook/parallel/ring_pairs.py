"""Which queries of one process of a ring see which keys of another, exactly as upstream's mask says.

Each process's positions are two halves. Halves have numbers along the sequence; with causal attention,
process ``i`` of ``R`` has number ``2 i`` and, from its mirror image, ``2 (R - 1 - i) + 1``: so all have the
same work.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.compiler import is_dynamo_compiling
from torch.utils.weak import WeakTensorKeyDictionary

from veomni_hook.parallel.groups import SequenceGroup

__all__ = ["Hidden", "Pair", "Pairs", "hidden_by"]

#: Numbers of halves: queries that see none of the keys.
Hidden = tuple[tuple[int, int], ...]
#: By mask: its version, the size of a ring and the positions of a process; and what is hidden there.
_KNOWN: Any = WeakTensorKeyDictionary()


class Pair(NamedTuple):
    """Queries of one process and keys of one process.

    Attributes:
        queries: where the queries are among those of their process: the first, and how many.
        keys: the same of the keys.
        mask: of these queries and keys, ``[batch or 1, heads or 1, queries or 1, keys]``; or None.
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
        ring: the processes, in the order of their positions.
        length: how many positions each of them has; the last ones may be copies.
        full: how many positions are no copies.
        triangle: whether a position sees those up to itself, and there is no mask.
        hidden: what need not be computed.
    """

    ring: SequenceGroup
    length: int
    full: int
    triangle: bool
    hidden: Hidden

    @property
    def balanced(self) -> bool:
        """Whether processes have the halves that `ring_attention` gives them by `_mirrored`."""
        return all(pair in self.hidden for pair in _later(self.ring.size))

    def after(self, steps: int, mask: torch.Tensor | None) -> Iterator[Pair]:
        """Yield what this process computes with the keys that it has after so many steps around the ring.

        ``mask`` is that of all positions, ``[batch or 1, heads or 1, full or 1, full]``.
        """
        for at, query in self._halves(self.ring.rank):
            for place, key in self._halves((self.ring.rank - steps) % self.ring.size):
                if (query, key) not in self.hidden:
                    yield from self._pair((at, query), (place, key), mask)

    def _halves(self, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the halves of a process: where they begin among its positions, and their numbers."""
        other = self.ring.size - 1 - rank if self.balanced else rank
        return (0, 2 * rank), (self.length // 2, 2 * other + 1)

    def _pair(
        self, query: tuple[int, int], key: tuple[int, int], mask: torch.Tensor | None
    ) -> Iterator[Pair]:
        (first, queries), (start, keys) = _run(query[1], self.length), _run(key[1], self.length)
        if not self.triangle:  # else only copies see copies: they are the last
            keys = min(keys, self.full - start)
        if queries == 0 or keys <= 0:
            return
        if mask is not None:
            mask = mask.narrow(3, start, keys)
            if mask.shape[2] > 1:
                # Copies see what the last position sees.
                rows = torch.arange(first, first + queries, device=mask.device)
                mask = mask.index_select(2, rows.clamp(max=self.full - 1))
        yield Pair((query[0], queries), (key[0], keys), mask, self.triangle and query == key)


def hidden_by(mask: torch.Tensor | None, size: int, length: int, *, causal: bool) -> Hidden:
    """Return the pairs of halves, in a ring of ``size`` processes, of which a mask shows nothing.

    The host waits once for each mask; where dynamo traces, it does not, and all pairs are computed.
    """
    if mask is None:
        return _later(size) if causal else ()
    if is_dynamo_compiling() or mask.is_inference():
        return ()
    asked = mask._version, size, length
    known = _KNOWN.get(mask)
    if known is None or known[0] != asked:
        known = _KNOWN[mask] = asked, _hidden(mask, size, length)
    hidden: Hidden = known[1]
    return hidden


def _hidden(mask: torch.Tensor, size: int, length: int) -> Hidden:
    visible = mask if mask.dtype is torch.bool else mask > torch.finfo(mask.dtype).min
    visible = visible.flatten(0, 1)
    # Where a query sees nothing, eager attention gives all keys the same weight.
    blind = ~visible.any(2, keepdim=True)
    full, runs = visible.shape[2], [_run(half, length) for half in range(2 * size)]
    needed = (visible | blind).any(0).expand(full, full)
    # Copies see what the last position sees.
    rows = [needed[min(first, full - 1) : first + count].any(0) for first, count in runs]
    table = torch.stack([row[first : first + count].any() for row in rows for first, count in runs])
    numbers = table.view(len(runs), -1).tolist()
    return tuple((i, j) for i, row in enumerate(numbers) for j, shown in enumerate(row) if not shown)


def _run(half: int, length: int) -> tuple[int, int]:
    process, second = divmod(half, 2)
    first = length // 2
    return process * length + second * first, length - first if second else first


def _later(size: int) -> Hidden:
    """Return the pairs whose keys are all behind the queries."""
    return tuple((query, key) for query in range(2 * size) for key in range(query + 1, 2 * size))
