"""Two texts side by side: which line of one belongs beside which line of the other.

Lines are compared without their indentation, so upstream's code that moved into the ``else`` of a guard is
paired with itself, and is not shown as removed and added.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from enum import StrEnum
from itertools import groupby, zip_longest

__all__ = ["Kind", "Pair", "Run", "pairs", "runs", "split"]

#: How many unchanged lines around a change are not folded.
_CONTEXT = 3
#: Fewer unchanged lines than this are not folded.
_FEW = 3


class Kind(StrEnum):
    """What happened to a line."""

    SAME = "same"
    MOVED = "moved"  # the same except for its indentation
    ADDED = "added"
    REMOVED = "removed"
    CHANGED = "changed"


@dataclass(frozen=True, slots=True)
class Pair:
    """A line of the left text beside one of the right text, numbered from 0; None: no line."""

    kind: Kind
    left: int | None
    right: int | None


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive pairs; ``folded``: they are unchanged and far from every change."""

    pairs: tuple[Pair, ...]
    folded: bool


def split(text: str) -> list[str]:
    """Return the lines of a text as Python counts them, without line ends."""
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    return lines[:-1] if lines[-1] == "" else lines


def pairs(left: Sequence[str], right: Sequence[str]) -> list[Pair]:
    """Return every line of both texts once, in order."""
    texts = [line.strip() for line in left], [line.strip() for line in right]
    # Short lines (empty ones, brackets) occur everywhere and do not show which lines belong together, so they
    # are compared last.
    matcher = SequenceMatcher(lambda line: len(line) < 2, *texts, autojunk=False)
    paired: list[Pair] = []
    for how, start, end, first, last in matcher.get_opcodes():
        inner = [(how, start, end, first, last)]
        if how == "replace":
            rest = SequenceMatcher(None, texts[0][start:end], texts[1][first:last], autojunk=False)
            inner = [(h, start + a, start + b, first + c, first + d) for h, a, b, c, d in rest.get_opcodes()]
        for part in inner:
            paired += _paired(left, right, *part)
    return paired


def _paired(
    left: Sequence[str], right: Sequence[str], how: str, start: int, end: int, first: int, last: int
) -> Iterator[Pair]:
    if how == "equal":
        for a, b in zip(range(start, end), range(first, last), strict=True):
            yield Pair(Kind.SAME if left[a] == right[b] else Kind.MOVED, a, b)
    else:
        for one, other in zip_longest(range(start, end), range(first, last)):
            kind = Kind.ADDED if one is None else Kind.REMOVED if other is None else Kind.CHANGED
            yield Pair(kind, one, other)


def runs(line_pairs: Sequence[Pair]) -> list[Run]:
    """Return the pairs in runs; pairs far from every change are folded."""
    folded: list[bool] = []
    for same, members in groupby(line_pairs, lambda pair: pair.kind is Kind.SAME):
        count = len(list(members))
        before = _CONTEXT if folded else 0
        after = _CONTEXT if len(folded) + count < len(line_pairs) else 0
        inner = count - before - after
        if same and inner >= _FEW:
            folded += [False] * before + [True] * inner + [False] * after
        else:
            folded += [False] * count
    together = groupby(zip(line_pairs, folded, strict=True), lambda one: one[1])
    return [Run(tuple(pair for pair, _ in members), fold) for fold, members in together]
