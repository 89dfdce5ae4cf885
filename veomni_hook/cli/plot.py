"""The demo's picture: loss curves, step times, import times and the peak memory of one loss step."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

PLAIN, HOOKED = "#7a7a7a", "#d1495b"
MEBIBYTE = 2**20


def write_plot(report: Mapping[str, Any], path: Path) -> None:
    """Draw the demo's report into a PNG file; needs matplotlib.

    Args:
        report: what `veomni_hook.cli.demo` measured.
        path: the file to write; replaced if it is there.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(10, 7), layout="constrained")
    figure.suptitle(
        f"{report['module'].rpartition('.')[2]}: transformers {report['transformers']}, {report['device']}"
    )
    _curves(axes[0][0], report["plain"]["losses"], report["hooked"]["losses"])
    _curves(
        axes[0][1],
        [seconds * 1e3 for seconds in report["plain"]["step_seconds"]],
        [seconds * 1e3 for seconds in report["hooked"]["step_seconds"]],
    )
    axes[0][0].set(title="Training loss", xlabel="step", ylabel="cross-entropy")
    axes[0][1].set(title="Step time", xlabel="step", ylabel="ms", ylim=(0, None))
    imports = {name: seconds * 1e3 for name, seconds in report["import_seconds"].items()}
    _bars(axes[1][0], imports, "%.1f ms")
    axes[1][0].set(title="Import of the modeling module", xlabel="cold: first of its process", ylabel="ms")
    peaks = {name: report[name]["peak_bytes"] / MEBIBYTE for name in ("eager", "chunked")}
    _bars(axes[1][1], peaks, "%.0f MiB")
    size = f"{report['tokens']:,} tokens, vocabulary {report['vocabulary']:,}"
    axes[1][1].set(title="Peak memory of one loss step", xlabel=size, ylabel="MiB")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _curves(axis: Any, plain: list[float], hooked: list[float]) -> None:
    axis.plot(range(1, len(plain) + 1), plain, color=PLAIN, linewidth=3, label="without the hook")
    axis.plot(range(1, len(hooked) + 1), hooked, color=HOOKED, linewidth=1.2, label="with the hook")
    axis.locator_params(axis="x", integer=True)
    axis.legend()
    axis.grid(alpha=0.3)


def _bars(axis: Any, values: Mapping[str, float], form: str) -> None:
    bars = axis.bar(
        list(values), list(values.values()), color=[PLAIN, *[HOOKED] * (len(values) - 1)], width=0.6
    )
    axis.bar_label(bars, fmt=form)
    axis.margins(y=0.15)
