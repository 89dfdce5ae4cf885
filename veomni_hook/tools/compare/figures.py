"""The figures of a comparison: times, tokens, memory and losses of runs without and with the hook."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import TypeVar

from veomni_hook.tools.compare.runs import Run
from veomni_hook.tools.significance import Comparison, compare

T = TypeVar("T")

__all__ = ["LossDifference", "Side", "loss_difference", "side", "times", "warm"]

#: A difference is relative to the loss, but at least to this share of the mean loss: losses may be near 0.
FLOOR = 0.05


@dataclass(frozen=True)
class Side:
    """All runs of one kind. Unknown values are None or empty.

    Attributes:
        runs: how many runs have steps.
        counted: how many step times count, without the warm-up.
        median: the median step time in seconds.
        quartiles: the range of the middle half of the step times.
        medians: the median of each run.
        tokens_a_second: the median over steps.
        peak: the largest peak of the runs, in bytes.
        first_step: seconds from the first call of the model to the end of the first step, median of the runs.
        time_to_first: seconds from the start of the command to the end of the first step, likewise.
    """

    runs: int
    counted: int
    median: float | None
    quartiles: tuple[float, float] | None
    medians: tuple[float, ...]
    tokens_a_second: float | None
    peak: int | None
    memory: str
    first_step: float | None
    time_to_first: float | None


@dataclass(frozen=True)
class LossDifference:
    """The largest relative difference between loss curves.

    Attributes:
        largest: over all pairs and steps; infinite if only one of two losses is a number; None: no pair.
        step: the step with that difference, from 1.
        by_step: the largest difference of all pairs at each step.
    """

    largest: float | None
    step: int | None
    by_step: tuple[float, ...]

    @property
    def identical(self) -> bool:
        """Whether all losses are equal."""
        return self.largest == 0.0


def warm(times: Sequence[T], warmup: int) -> list[T]:
    """Return the step times that count.

    Args:
        times: one for each step, from the second step on.
        warmup: how many steps to skip, including the first; never more than half of the step times.
    """
    return list(times[min(max(warmup - 1, 0), len(times) // 2) :])


def side(runs: Iterable[Run], warmup: int) -> Side:
    """Return the figures of the runs of one kind."""
    known = [run for run in runs if run.times]
    counted = [warm(run.seconds, warmup) for run in known]
    pooled = [seconds for of_run in counted for seconds in of_run]
    quartiles = statistics.quantiles(pooled, n=4, method="inclusive") if len(pooled) > 1 else pooled * 3
    peaks = [run.facts["peak"] for run in known if run.facts.get("peak") is not None]
    first_steps = [run.times[0] - run.first_call for run in known if run.first_call is not None]
    return Side(
        runs=len(known),
        counted=len(pooled),
        median=_median(pooled),
        quartiles=(quartiles[0], quartiles[2]) if quartiles else None,
        medians=tuple(statistics.median(of_run) for of_run in counted if of_run),
        tokens_a_second=_tokens_a_second(known, warmup),
        peak=max(peaks, default=None),
        memory=str(known[0].facts.get("memory", "")) if known else "",
        first_step=_median(first_step for first_step in first_steps if first_step > 0),
        time_to_first=_median(run.times[0] for run in known),
    )


def times(without: Sequence[Run], hooked: Sequence[Run], warmup: int) -> Comparison | None:
    """Compare the step times of the runs of each turn: a pair is the same step of both, on the same batch.

    The longer of two runs counts as far as the shorter goes. None if no turn has two runs with steps.
    """
    first, second = [], []
    partners = {run.turn: run for run in hooked}
    for run in without:
        partner = partners.get(run.turn)
        pairs = [*zip(run.seconds, partner.seconds, strict=False)] if partner else []
        if pairs := [pair for pair in warm(pairs, warmup) if all(pair)]:
            first.append([plain for plain, _ in pairs])
            second.append([patched for _, patched in pairs])
    return compare(first, second) if first else None


def loss_difference(first: Sequence[Run], second: Sequence[Run] | None = None) -> LossDifference:
    """Return how much the loss curves of runs differ: of all pairs within ``first``, or between the two."""
    pairs = combinations(first, 2) if second is None else product(first, second)
    by_step: list[float] = []
    for one, other in pairs:
        for step, value in enumerate(_differences(one.losses, other.losses)):
            if step == len(by_step):
                by_step.append(value)
            by_step[step] = max(by_step[step], value)
    if not by_step:
        return LossDifference(None, None, ())
    largest = max(by_step)
    return LossDifference(largest, by_step.index(largest) + 1, tuple(by_step))


def _differences(one: Sequence[float | None], other: Sequence[float | None]) -> list[float]:
    """The relative difference of two curves at each step that both have."""
    pairs = [(a, b) for a, b in zip(one, other, strict=False) if a is not None and b is not None]
    sizes = [abs(value) for pair in pairs for value in pair if math.isfinite(value)]
    floor = FLOOR * statistics.mean(sizes) if sizes else 0.0
    return [_difference(a, b, floor) for a, b in pairs]


def _difference(a: float, b: float, floor: float) -> float:
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    return abs(a - b) / max(abs(a), abs(b), floor)


def _tokens_a_second(runs: Iterable[Run], warmup: int) -> float | None:
    rates = []
    for run in runs:
        rated = list(zip(run.tokens[1:], run.seconds, strict=False))
        for tokens, seconds in warm(rated, warmup):
            if tokens is None:
                return None
            rates.append(tokens / seconds if seconds else math.inf)
    return _median(rates)


def _median(values: Iterable[float]) -> float | None:
    known = list(values)
    return statistics.median(known) if known else None
