"""What is said of two sides that were measured by turns, on times whose answer is known."""

from __future__ import annotations

import random

import pytest

from veomni_hook.tools.cli.demo import turns


@pytest.mark.parametrize(("pairs", "rank"), [(1, 0), (5, 0), (6, 1), (9, 2), (17, 5), (57, 21)])
def test_the_rank_is_that_of_the_tables_of_the_sign_test(pairs, rank):
    assert turns._rank(pairs) == rank


def test_a_machine_that_slows_down_does_not_change_the_ratio():
    # One after the other these sides would differ by a factor of two.
    plain = [1.0 + 0.1 * turn for turn in range(20)]
    found = turns.compare(plain, [0.98 * (seconds + 0.05) for seconds in plain])
    assert found.verdict == turns.SAME
    assert found.ratio == pytest.approx(1.005, abs=0.02)


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [
        ([0.7] * 6, turns.FASTER),
        ([1.2] * 6, turns.SLOWER),
        ([0.97, 0.98, 1.0, 1.02, 1.04, 0.99], turns.SAME),
        ([0.97, 0.98, 1.0, 1.02, 1.2, 0.99], turns.NOISY),
        ([0.7] * 5, turns.FEW),
        # Two outliers of nine are outside of the interval.
        ([0.7, 0.7, 0.7, 0.7, 0.7, 0.7, 0.7, 0.7, 3.0], turns.FASTER),
    ],
)
def test_verdicts(ratios, verdict):
    found = turns.compare([2.0] * len(ratios), [2.0 * ratio for ratio in ratios])
    assert found.verdict == verdict
    assert found.low <= found.ratio <= found.high
    assert found.to_dict()["pairs"] == len(ratios)


def test_the_interval_holds_the_true_ratio_in_most_runs():
    chance = random.Random(5)
    held = 0
    for _ in range(400):
        plain = [chance.uniform(1, 2) for _ in range(17)]
        found = turns.compare(plain, [0.9 * each * chance.uniform(0.8, 1.2) for each in plain])
        held += found.low <= 0.9 <= found.high
    assert 0.92 <= held / 400 <= 0.99


def test_sides_that_were_not_measured_by_turns_are_an_error():
    with pytest.raises(ValueError, match="shorter"):
        turns.compare([1.0, 1.0], [1.0])
