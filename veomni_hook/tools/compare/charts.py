"""Line charts as inline SVG without scripts, fonts or colours: the page's style applies."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from veomni_hook.tools.report.html import Html, tag

__all__ = ["Line", "chart"]

WIDTH, HEIGHT = 640, 260
LEFT, RIGHT, TOP, BOTTOM = 68, 12, 12, 40
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


def chart(
    title: str, lines: Sequence[Line], said: Callable[[float], str], *, zero: bool = False, log: bool = False
) -> Html:
    """Return an SVG element with a caption and a legend; a sentence if there is nothing to draw.

    Args:
        title: what is drawn, also for screen readers.
        lines: the curves; the last one is drawn on top.
        said: formats a value of the vertical axis.
        zero: start the vertical axis at 0.
        log: use a logarithmic vertical axis; values of 0 are drawn at its lower end.
    """
    known = [value for line in lines for value in line.values if value is not None and (value > 0 or not log)]
    if not known:
        return tag("figure", tag("figcaption", title), tag("p", "Nothing to draw."))
    ticks = _powers(known) if log else _ticks(0.0 if zero else min(known), max(known))
    low, high = ticks[0], ticks[-1]
    steps = max(line.first + len(line.values) - 1 for line in lines)

    def across(step: int) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (step - 1) / max(steps - 1, 1)

    def down(value: float) -> float:
        share = (
            (math.log10(max(value, low)) - math.log10(low)) / (math.log10(high) - math.log10(low))
            if log
            else ((value - low) / (high - low))
        )
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share

    drawn = [*(_tick(down(value), said(value)) for value in ticks), *_steps(steps, across)]
    for line in lines:
        drawn += _drawn(line, across, down)
    names = list(dict.fromkeys((line.label, line.style) for line in lines))
    legend = "".join(f'<li><i class="{style}"></i>{escape(label)}</li>' for label, style in names)
    return Html(
        f'<figure><figcaption>{escape(title)}</figcaption><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(title, quote=True)}">{"".join(drawn)}</svg>'
        f'<ul class="legend">{legend}</ul></figure>'
    )


def _drawn(line: Line, across: Callable[[int], float], down: Callable[[float], float]) -> list[str]:
    """The parts of a line between its gaps; a single value is a dot."""
    parts: list[list[str]] = [[]]
    for number, value in enumerate(line.values):
        if value is None:
            parts.append([])
        else:
            parts[-1].append(f"{across(line.first + number):.1f},{down(value):.1f}")
    drawn = []
    for part in filter(None, parts):
        if len(part) == 1:
            x, y = part[0].split(",")
            drawn.append(f'<circle class="{line.style}" cx="{x}" cy="{y}" r="2.5"/>')
        else:
            drawn.append(f'<polyline class="{line.style}" points="{" ".join(part)}"/>')
    return drawn


def _tick(y: float, text: str) -> str:
    return (
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{escape(text)}</text>'
    )


def _steps(steps: int, across: Callable[[int], float]) -> list[str]:
    stride = max(1, round(steps / 8))
    shown = range(stride, steps + 1, stride)
    marks = [
        f'<text x="{across(step):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{step}</text>'
        for step in shown
    ]
    middle = LEFT + (WIDTH - LEFT - RIGHT) / 2
    return [*marks, f'<text x="{middle:.1f}" y="{HEIGHT - 6}" text-anchor="middle">step</text>']


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
