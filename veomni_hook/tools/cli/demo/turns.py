"""Compare two sides measured alternately: their time ratio, and whether the difference is significant.

A temporary slowdown of the machine affects both sides of a pair, so the ratio within a pair hardly changes.
Two measurements that simply ran one after the other cannot resolve a difference of a few percent.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["FASTER", "FEW", "NOISY", "SAME", "SLOWER", "Comparison", "compare"]

FASTER, SLOWER, SAME, NOISY, FEW = "faster", "slower", "same", "noisy", "few"

CONFIDENCE = 0.95
# Two processes that run the same code differ by a few percent, depending on their memory placement.
MARGIN = 0.05


@dataclass(frozen=True)
class Comparison:
    """The second side against the first.

    Attributes:
        first: the median of the first side, in seconds.
        second: the median of the second side, in seconds.
        ratio: the median over the pairs of second to first.
        low: the lower end of the 95% interval of that median; the smallest ratio where pairs are too few.
        high: the upper end.
        pairs: how many pairs there are.
        quartiles: the lower and upper quartile of the first side's times, in seconds.
        verdict: `faster` or `slower` (the interval excludes 1), `same` (it is within 5% of 1), `noisy` (it
            contains 1 and is wider), or `few` (too few pairs for an interval).
    """

    first: float
    second: float
    ratio: float
    low: float
    high: float
    pairs: int
    quartiles: tuple[float, float]
    verdict: str

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes, for JSON."""
        return asdict(self)


def compare(first: Sequence[float], second: Sequence[float]) -> Comparison:
    """Return the comparison of two sides.

    Args:
        first: seconds of each turn of the baseline side, without warm-up; at least one.
        second: those of the other side, in the same order.

    Raises:
        ValueError: the sides differ in length, or are empty.
    """
    ratios = sorted(after / before for before, after in zip(first, second, strict=True))
    rank = _rank(len(ratios))
    low, high = ratios[max(rank, 1) - 1], ratios[-max(rank, 1)]
    middle = statistics.median(ratios)
    quarter = (len(first) - 1) // 4
    ordered = sorted(first)
    return Comparison(
        first=statistics.median(first),
        second=statistics.median(second),
        ratio=middle,
        low=low,
        high=high,
        pairs=len(ratios),
        quartiles=(ordered[quarter], ordered[-1 - quarter]),
        verdict=_verdict(low, high) if rank else FEW,
    )


def _verdict(low: float, high: float) -> str:
    if 1 - MARGIN <= low and high <= 1 + MARGIN:
        return SAME
    if high < 1:
        return FASTER
    return SLOWER if low > 1 else NOISY


def _rank(count: int) -> int:
    """Return the k for which the k-th smallest and k-th largest of `count` values enclose the median.

    The probability is that of a fair coin showing at least k heads and k tails; no distribution of the values
    is assumed. Returns 0 if even the smallest and the largest do not enclose it with enough confidence.
    """
    rank, outside = 0, 0.0
    while True:
        outside += 2 * math.comb(count, rank) / 2**count
        if outside > 1 - CONFIDENCE or 2 * rank >= count:
            return rank
        rank += 1
