"""The demo's picture: for each way of training the losses, the step times and the memory of both sides."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from veomni_hook.tools.cli.demo.shapes import Part, Report

# Distinguishable for readers with red-green colour blindness, and in print.
PLAIN, HOOKED = "#8c8c8c", "#d55e00"
SIDES = (("without", PLAIN), ("with the hook", HOOKED))
MEBIBYTE = 2**20


def write_plot(report: Report, path: Path) -> None:
    """Draw the demo's report into a PNG file.

    Args:
        report: what `veomni_hook.tools.cli.demo.command.compared` returned.
        path: the file to write; replaced if it exists.

    Raises:
        ImportError: matplotlib is not installed, or cannot be imported.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    parts = {part["title"]: part for part in report["parts"].values()}
    figure = pyplot.figure(figsize=(10, 6.5), layout="constrained")
    above, below = figure.subfigures(2, 1)
    curves = above.subplots(1, len(parts), squeeze=False)[0]
    bars = below.subplots(1, 2)
    figure.suptitle(
        f"Fine-tuning {report['model']} without and with veomni-hook "
        f"(transformers {report['transformers']}, {report['device_name']})"
    )
    for axis, (title, part) in zip(curves, parts.items(), strict=True):
        _curves(axis, part, title)
    sides = [*zip(*((part["plain"], part["hooked"]) for part in parts.values()), strict=True)]
    times = [[median(training["step_seconds"]) * 1e3 for training in side] for side in sides]
    memory = [[training["peak_bytes"] / MEBIBYTE for training in side] for side in sides]
    together = "ratio {ratio:.2f} ({low:.2f} to {high:.2f})".format_map(report["step_time"])
    _bars(bars[0], list(parts), times, f"Median step time in ms: {together}")
    ratios = [after / before for before, after in zip(*memory, strict=True)]
    names = [f"{title}: {ratio:.2f}" for title, ratio in zip(parts, ratios, strict=True)]
    _bars(bars[1], names, memory, "Peak memory above the weights in MiB, and its ratio")
    figure.legend(*curves[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _curves(axis: Any, part: Part, title: str) -> None:
    # The second line is dashed and thinner: the two usually coincide.
    trainings = zip(SIDES, (part["plain"], part["hooked"]), (("-", 4), ("--", 1.5)), strict=True)
    for (label, colour), training, (line, width) in trainings:
        losses = training["losses"]
        axis.plot(
            range(1, len(losses) + 1), losses, color=colour, label=label, linestyle=line, linewidth=width
        )
    axis.set(title=f"Loss, {title}", xlabel="step")
    axis.locator_params(axis="x", integer=True)
    axis.grid(alpha=0.3)


def _bars(axis: Any, names: Sequence[str], values: Sequence[Sequence[float]], title: str) -> None:
    for at, (side, (_, colour)) in enumerate(zip(values, SIDES, strict=True)):
        places = [place + 0.4 * at for place in range(len(names))]
        axis.bar_label(axis.bar(places, side, width=0.38, color=colour), fmt="{:,.0f}", fontsize=8)
    axis.set_xticks([place + 0.2 for place in range(len(names))], names)
    axis.set(title=title)
    axis.margins(y=0.15)
