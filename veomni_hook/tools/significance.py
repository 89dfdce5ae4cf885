"""Whether the second of two sides is faster, the same, slower, or cannot be told from the first.

Sides are measured in pairs: the same step of both, or one turn after the other. So what slows the machine
down for a while, or work that differs by step, is in both times of a pair. The values are the n ratios of
second to first, in order r_1 <= ... <= r_n.

Formula: the estimate is their median. Its interval is [r_k, r_(n+1-k)] with the largest k for which
2 * P(Binomial(n, 1/2) < k) <= 5 %: the median is outside only if fewer than k of n fair coins fall on one
side. With fewer than six pairs there is no such k. Where several processes of each kind were measured, N is
the range of their medians relative to its mean, the larger of both kinds, and the interval is widened to
[low / (1 + N)^2, high * (1 + N)^2]. The verdict is `same` if the interval lies within 5 % of 1, else `faster`
or `slower` if it excludes 1, else `noisy`.

Assumptions: the pairs of two processes are independent and have one median; no distribution is assumed. A
process has an offset of its own, as by its memory placement, which no number of its steps averages out: hence
the 5 %, and N. One process of each kind does not show it: with offsets of 2 %, one of four comparisons of
the same code finds a difference; with two of each kind, one of seventy, and one of nineteen at 10 %.

Source: the interval of the sign test, W. J. Conover, Practical Nonparametric Statistics (3rd edition, 1999),
chapter 3; equivalence by inclusion of an interval, D. J. Schuirmann, Journal of Pharmacokinetics and
Biopharmaceutics 15 (1987), 657. The square of 1 + N is ours. tests/tools/test_significance.py measures these
rates.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["FASTER", "FEW", "MARGIN", "NOISY", "SAME", "SLOWER", "Comparison", "compare"]

FASTER, SLOWER, SAME, NOISY, FEW = "faster", "slower", "same", "noisy", "few"

CONFIDENCE = 0.95
# Two processes that run the same code differ by a few percent, depending on their memory placement.
MARGIN = 0.05


@dataclass(frozen=True)
class Comparison:
    """The second side against the first.

    Attributes:
        ratio: the median over the pairs of second to first.
        low: the lower end of the 95% interval of that median; the smallest ratio where pairs are too few.
        high: the upper end.
        pairs: how many pairs there are.
        noise: by how much the medians of processes of the same kind differ; None with one process of a kind.
        verdict: `faster`, `slower`, `same`, `noisy`, or `few` (too few pairs for an interval).
    """

    ratio: float
    low: float
    high: float
    pairs: int
    noise: float | None
    verdict: str


def compare(first: Sequence[Sequence[float]], second: Sequence[Sequence[float]]) -> Comparison:
    """Return the comparison of two sides.

    Args:
        first: for each process of the baseline side, the times of its turns without warm-up.
        second: those of the other side: as many processes, with as many turns, in the same order.

    Raises:
        ValueError: the sides differ in length, or there is no pair.
    """
    ratios = sorted(
        after / before
        for processes in zip(first, second, strict=True)
        for before, after in zip(*processes, strict=True)
    )
    middle = statistics.median(ratios)
    noise = None
    if len(first) > 1:
        medians = [[statistics.median(times) for times in side] for side in (first, second)]
        noise = max((max(side) - min(side)) / statistics.mean(side) for side in medians)
    rank = _rank(len(ratios))
    widened = (1 + (noise or 0.0)) ** 2
    low, high = ratios[max(rank, 1) - 1] / widened, ratios[-max(rank, 1)] * widened
    if not rank:
        verdict = FEW
    elif 1 - MARGIN <= low and high <= 1 + MARGIN:
        verdict = SAME
    else:
        verdict = FASTER if high < 1 else SLOWER if low > 1 else NOISY
    return Comparison(middle, low, high, len(ratios), noise, verdict)


def _rank(count: int) -> int:
    """Return the k of the formula; 0 if even the smallest and the largest do not enclose the median."""
    rank, outside = 0, 0.0
    while True:
        outside += 2 * math.comb(count, rank) / 2**count
        if outside > 1 - CONFIDENCE or 2 * rank >= count:
            return rank
        rank += 1
