"""What is said of two sides, on times whose answer is known."""

from __future__ import annotations

import math
import random

import pytest

from veomni_hook.tools import significance
from veomni_hook.tools.significance import FASTER, FEW, NOISY, SAME, SLOWER, compare

STEADY = [1.0] * 8


@pytest.mark.parametrize(("pairs", "rank"), [(1, 0), (5, 0), (6, 1), (9, 2), (17, 5), (57, 21)])
def test_the_rank_is_that_of_the_tables_of_the_sign_test(pairs, rank):
    assert significance._rank(pairs) == rank


# The times of each process with the change; without it every turn takes a second, or what follows.
@pytest.mark.parametrize(
    ("changed", "plain", "verdict", "interval"),
    [
        ([[0.7] * 6], None, FASTER, (0.7, 0.7)),
        ([[1.2] * 6], None, SLOWER, (1.2, 1.2)),
        ([[0.97, 0.98, 1.0, 1.02, 1.04, 0.99]], None, SAME, (0.97, 1.04)),
        ([[0.97, 0.98, 1.0, 1.02, 1.2, 0.99]], None, NOISY, (0.97, 1.2)),
        ([[0.7] * 5], None, FEW, (0.7, 0.7)),
        # A difference that is certain, and smaller than that of two processes with the same code.
        ([[0.97] * 6], None, SAME, (0.97, 0.97)),
        ([[0.94] * 6], None, FASTER, (0.94, 0.94)),
        # Two outliers of nine are outside of the interval.
        ([[*[0.7] * 8, 3.0]], None, FASTER, (0.7, 0.7)),
        # Steps of other lengths, and a machine that slows down: the ratio of a pair has neither.
        ([[0.5, 4.5] * 4], [[0.5, 4.5] * 4], SAME, (1.0, 1.0)),
        ([[0.98 * (1.05 + 0.1 * turn) for turn in range(20)]], [[1.0 + 0.1 * turn for turn in range(20)]], SAME, None),
        # Of several processes: each may have few turns; what they differ by is twice in the interval.
        ([[0.7] * 3] * 2, None, FASTER, (0.7, 0.7)),
        ([STEADY, [1.1] * 8], [STEADY, [1.3] * 8], NOISY, (1.1 / 1.3 / (1 + 0.3 / 1.15) ** 2, (1 + 0.3 / 1.15) ** 2)),
        ([[0.5] * 8, [0.55] * 8], [STEADY, [1.1] * 8], FASTER, (0.5 / (1 + 0.1 / 1.05) ** 2, 0.5 * (1 + 0.1 / 1.05) ** 2)),
    ],
)  # fmt: skip
def test_verdicts(changed, plain, verdict, interval):
    found = compare(plain or [[1.0] * len(times) for times in changed], changed)
    assert found.verdict == verdict
    assert found.pairs == sum(map(len, changed))
    assert (found.noise is None) is (len(changed) == 1)
    assert interval is None or (found.low, found.high) == pytest.approx(interval)
    assert found.low <= found.ratio <= found.high


def processes(
    chance: random.Random, count: int, turns: int, offset: float, spread: float, speed: float = 1.0
):
    """Times of processes with offsets of their own, on turns that take from one second to two."""
    work = random.Random(3)
    lengths = [work.uniform(1, 2) for _ in range(turns)]
    offsets = [speed * math.exp(chance.gauss(0, offset)) for _ in range(count)]
    return [[one * length * chance.lognormvariate(0, spread) for length in lengths] for one in offsets]


@pytest.mark.parametrize(
    ("count", "turns", "offset", "spread", "most"),
    [
        (1, 17, 0.0, 0.01, 0.0),  # within the margin, whatever the order
        (1, 17, 0.0, 0.2, 0.06),
        (1, 6, 0.0, 0.2, 0.05),
        (2, 17, 0.0, 0.2, 0.02),
        (2, 17, 0.02, 0.02, 0.05),
        (2, 17, 0.1, 0.02, 0.07),
        (4, 17, 0.1, 0.02, 0.01),
        (1, 17, 0.02, 0.02, 0.3),  # the limit of one process of each kind
    ],
)
def test_false_alarms_are_rare(count, turns, offset, spread, most):
    chance = random.Random(5)
    alarms = 0
    for _ in range(600):
        first, second = (processes(chance, count, turns, offset, spread) for _ in range(2))
        alarms += compare(first, second).verdict in (FASTER, SLOWER)
    assert alarms / 600 <= most, alarms / 600


def test_the_interval_holds_the_true_ratio_and_excludes_1():
    chance = random.Random(5)
    found = [
        compare(processes(chance, 1, 17, 0.0, 0.1), processes(chance, 1, 17, 0.0, 0.1, 0.8))
        for _ in range(400)
    ]
    assert 0.92 <= sum(one.low <= 0.8 <= one.high for one in found) / 400 <= 0.99
    assert sum(one.verdict == FASTER for one in found) / 400 > 0.9


def test_sides_that_were_not_measured_in_pairs_are_an_error():
    for first, second in (([[1.0, 1.0]], [[1.0]]), ([[1.0]], [[1.0], [1.0]]), ([], [])):
        with pytest.raises(ValueError, match=r"shorter|longer|no median"):
            compare(first, second)
