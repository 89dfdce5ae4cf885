"""The demo's plot: loss curves, and time and memory of a step without and with the hook."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

# Distinguishable for readers with red-green colour blindness, and in print.
PLAIN, HOOKED = "#8c8c8c", "#d55e00"
MEBIBYTE = 2**20


def write_plot(report: Mapping[str, Any], path: Path) -> None:
    """Draw the demo's report into a PNG file.

    Args:
        report: the measurements of `veomni_hook.cli.demo.command`; missing parts are omitted.
        path: the file to write; replaced if it exists.

    Raises:
        ImportError: matplotlib is not installed, or cannot be imported.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = _panels(report)
    rows = (len(panels) + 1) // 2
    figure, axes = pyplot.subplots(rows, 2, figsize=(10, 3.5 * rows), layout="constrained", squeeze=False)
    device = report.get("device_name", "")
    figure.suptitle(
        f"Without and with veomni-hook: transformers {report['transformers']}{device and ', '}{device}"
    )
    for axis, draw in zip(axes.flat, panels, strict=False):
        draw(axis)
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _panels(report: Mapping[str, Any]) -> list[Callable[[Any], None]]:
    """Return a function for each panel that draws it on an axis."""
    panels: list[Callable[[Any], None]] = []
    if "training" in report:
        sides = [report["training"][name] for name in ("plain", "hooked")]
        losses = [side["losses"] for side in sides]
        steps = [[seconds * 1e3 for seconds in side["step_seconds"]] for side in sides]
        panels.append(lambda axis: _curves(axis, losses, "Training loss", "cross-entropy"))
        panels.append(lambda axis: _curves(axis, steps, "Step time of the training", "ms", ylim=(0, None)))
    for part, title in (("vocabulary", "Vocabulary of 151,936"), ("experts", "Mixture of experts")):
        if part in report:
            panels += _costs(report[part], title)
    if "imports" in report:
        imports = {name: seconds * 1e3 for name, seconds in report["imports"].items()}
        panels.append(lambda axis: _bars(axis, imports, "Import of modeling_qwen3", "ms", "%.1f ms"))
    return panels


def _costs(part: Mapping[str, Any], title: str) -> list[Callable[[Any], None]]:
    time = part["step_time"]
    times = {"without": time["first"] * 1e3, "with the hook": time["second"] * 1e3}
    peaks = {
        name: part[side]["peak_bytes"] / MEBIBYTE
        for name, side in zip(times, ("plain", "hooked"), strict=True)
    }
    return [
        lambda axis: _bars(axis, times, f"{title}: step time", "ms", "%.0f ms"),
        lambda axis: _bars(axis, peaks, f"{title}: peak memory of a step", "MiB", "%.0f MiB"),
    ]


def _curves(axis: Any, values: list[list[float]], title: str, unit: str, **limits: Any) -> None:
    for side, colour, width, label in zip(
        values, (PLAIN, HOOKED), (3, 1.2), ("without", "with the hook"), strict=True
    ):
        axis.plot(range(1, len(side) + 1), side, color=colour, linewidth=width, label=label)
    axis.set(title=title, xlabel="step", ylabel=unit, **limits)
    axis.locator_params(axis="x", integer=True)
    axis.legend()
    axis.grid(alpha=0.3)


def _bars(axis: Any, values: Mapping[str, float], title: str, unit: str, form: str) -> None:
    colours = [PLAIN, *[HOOKED] * (len(values) - 1)]
    axis.bar_label(axis.bar(list(values), list(values.values()), color=colours, width=0.6), fmt=form)
    axis.set(title=title, ylabel=unit)
    axis.margins(y=0.15)
