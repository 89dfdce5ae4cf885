"""A heat map of experts as SVG, without scripts or fonts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape, quoteattr

from veomni_hook.printable import printable

__all__ = ["heat_map"]

LABELS, TOP, ROW, WIDEST = 230, 34, 18, 900
#: Colours from no tokens over the mean (1) to `FULL` times the mean and more.
LOW, MEAN, HIGH, FULL = (255, 255, 255), (120, 170, 220), (150, 20, 60), 4.0
IDLE = "#222222"


def heat_map(rows: Mapping[str, Sequence[int]], title: str) -> str:
    """Return a picture of ``rows``: by the router's name, the tokens of each expert.

    The colour is a number in multiples of its row's mean; zero is a black mark. Each field says its numbers
    as a tooltip.
    """
    columns = max((len(row) for row in rows.values()), default=1)
    wide = max(2.0, min(24.0, WIDEST / columns))
    width, height = LABELS + wide * columns + 10, TOP + ROW * len(rows) + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height}" '
        f'viewBox="0 0 {width:.0f} {height}" font-family="sans-serif" font-size="11">',
        f'<text x="8" y="20" font-size="14">{escape(printable(title))}</text>',
    ]
    for number, (name, counts) in enumerate(rows.items()):
        down = TOP + ROW * number
        parts.append(
            f'<text x="{LABELS - 8}" y="{down + 12}" text-anchor="end">{escape(printable(name))}</text>'
        )
        mean = sum(counts) / len(counts)
        for expert, tokens in enumerate(counts):
            times = tokens / mean if mean else 0.0
            said = quoteattr(
                f"{printable(name)}, expert {expert}: {tokens} tokens, {times:.2f} times the mean"
            )
            colour = _colour(times) if tokens else IDLE
            parts.append(
                f'<rect x="{LABELS + wide * expert:.1f}" y="{down}" width="{wide:.1f}" height="{ROW - 2}" '
                f'fill="{colour}"><title>{said[1:-1]}</title></rect>'
            )
    parts.append(
        f'<text x="{LABELS}" y="{height - 10}">black: no token; white: few; blue: the mean; red: '
        f"{FULL:g} times the mean or more</text></svg>"
    )
    return "\n".join(parts)


def _colour(times: float) -> str:
    low, high, share = (LOW, MEAN, times) if times < 1 else (MEAN, HIGH, min((times - 1) / (FULL - 1), 1.0))
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(low, high, strict=True))
    return f"#{red:02x}{green:02x}{blue:02x}"
