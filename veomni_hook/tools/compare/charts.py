"""Line charts, laid out for inline SVG without scripts, fonts or colours: the page's style applies."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

__all__ = ["Chart", "Line", "chart"]

SMALLEST = 1e-12


@dataclass(frozen=True)
class Line:
    """One curve.

    Attributes:
        label: its name in the legend.
        style: the CSS class that gives its colour and width.
        values: one per step; None leaves a gap.
        first: the step of the first value.
    """

    label: str
    style: str
    values: Sequence[float | None]
    first: int = 1


@dataclass(frozen=True)
class Chart:
    """What the template draws; without ticks there is nothing to draw.

    Attributes:
        title: what is drawn, also for screen readers.
        ticks: the height and the text of each line of the grid.
        steps: the place and the number of the steps that are named.
        curves: the style and the points of each part of a line between its gaps; a single value is a dot.
        legend: the label and the style of each line.
    """

    title: str
    ticks: Sequence[tuple[float, str]] = ()
    steps: Sequence[tuple[float, int]] = ()
    curves: Sequence[tuple[str, Sequence[tuple[float, float]]]] = ()
    legend: Sequence[tuple[str, str]] = ()
    width: int = 640
    height: int = 260
    left: int = 68
    right: int = 628
    top: int = 12
    bottom: int = 220


def chart(
    title: str, lines: Sequence[Line], said: Callable[[float], str], *, zero: bool = False, log: bool = False
) -> Chart:
    """Return lines as a chart.

    Args:
        title: what is drawn.
        lines: the curves; the last one is drawn on top.
        said: formats a value of the vertical axis.
        zero: start the vertical axis at 0.
        log: use a logarithmic vertical axis; values of 0 are drawn at its lower end.
    """
    known = [value for line in lines for value in line.values if value is not None and (value > 0 or not log)]
    if not known:
        return Chart(title)
    ticks = _powers(known) if log else _ticks(0.0 if zero else min(known), max(known))
    steps = max(line.first + len(line.values) - 1 for line in lines)
    low, high = (math.log10(tick) if log else tick for tick in (ticks[0], ticks[-1]))

    def across(step: int) -> float:
        return Chart.left + (Chart.right - Chart.left) * (step - 1) / max(steps - 1, 1)

    def down(value: float) -> float:
        place = math.log10(max(value, ticks[0])) if log else value
        return Chart.bottom - (Chart.bottom - Chart.top) * (place - low) / (high - low)

    stride = max(1, round(steps / 8))
    curves = [
        (line.style, [(across(step), down(value)) for step, value in part if value is not None])
        for line in lines
        for there, part in groupby(enumerate(line.values, line.first), lambda point: point[1] is not None)
        if there
    ]
    return Chart(
        title,
        [(down(tick), said(tick)) for tick in ticks],
        [(across(step), step) for step in range(stride, steps + 1, stride)],
        curves,
        [*dict.fromkeys((line.label, line.style) for line in lines)],
    )


def _ticks(low: float, high: float) -> list[float]:
    """Round values from below the lowest to above the highest."""
    span = high - low or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(span / 4))
    width = next(power * factor for factor in (1, 2, 5, 10) if span / (power * factor) <= 5)
    begin, end = math.floor(low / width), math.ceil(high / width)
    return [index * width for index in range(begin, max(end, begin + 1) + 1)]


def _powers(values: Sequence[float]) -> list[float]:
    low = math.floor(math.log10(max(min(values), SMALLEST)))
    high = max(math.ceil(math.log10(max(values))), low + 1)
    stride = max(1, math.ceil((high - low) / 6))
    return [10.0**power for power in range(low, high + stride, stride)]
