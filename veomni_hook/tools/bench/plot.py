"""A run of benchmarks as a picture: what share of the limit every side reaches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from veomni_hook.tools.bench.run import Row

__all__ = ["write_plot"]

_COLOURS = {
    "eager": "#b0b0b0",
    "compile": "#7a7a7a",
    "liger": "#4f6d9a",
    "quack": "#6a9a4f",
    "sonic": "#8c6bb1",
    "ours": "#d1495b",
}


def write_plot(rows: Sequence[Row], title: str, path: Path) -> None:
    """Draw a bar for every side of every row that has a limit; needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [row for row in rows if row.share]
    sides = list(dict.fromkeys(side for row in shown for side in row.share))
    height = 0.8 / max(1, len(sides))
    figure, axis = pyplot.subplots(figsize=(9, 1 + 0.6 * len(shown)), layout="constrained")
    for number, side in enumerate(sides):
        places = [place + number * height for place, row in enumerate(shown) if side in row.share]
        values = [100 * row.share[side] for row in shown if side in row.share]
        axis.barh(places, values, height, label=side, color=_COLOURS.get(side))
    labels = [f"{row.op} {row.part}\n{row.shape}, {row.dtype}" for row in shown]
    axis.set_yticks([place + 0.4 - height / 2 for place in range(len(shown))], labels, fontsize=8)
    axis.set(xlabel="% of the limit (bandwidth of a copy, matrix products)", title=title)
    axis.invert_yaxis()
    axis.legend()
    axis.grid(axis="x", alpha=0.3)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
