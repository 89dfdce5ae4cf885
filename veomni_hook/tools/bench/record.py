"""A run of benchmarks as a table, as a file, and as a picture."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from veomni_hook import accelerator
from veomni_hook.releases import installed
from veomni_hook.tools.bench.run import Row
from veomni_hook.tools.bench.timing import bandwidth
from veomni_hook.tools.facts import Facts
from veomni_hook.tools.significance import FEW

__all__ = ["COLUMNS", "cells", "circumstances", "described", "write", "write_plot"]

#: Of the table, in front of the sides.
COLUMNS = ("op", "part", "dtype", "shape")
_VERSIONS = (
    "torch",
    "triton",
    "transformers",
    "torch_npu",
    "liger_kernel",
    "quack_kernels",
    "sonic_moe",
    "veomni-hook",
)
_COLOURS = {
    "eager": "#b0b0b0",
    "compile": "#7a7a7a",
    "liger": "#4f6d9a",
    "quack": "#6a9a4f",
    "sonic": "#8c6bb1",
    "ours": "#d1495b",
}


def cells(row: Row, sides: Sequence[str]) -> list[str]:
    """One line: of every side the time, the share of the limit, memory, and the verdict against ``eager``."""
    return [row.op, row.part, row.dtype, row.shape, *(_cell(row, side) for side in sides)]


def _cell(row: Row, side: str) -> str:
    if side not in row.milliseconds:
        return "-"
    words = [f"{row.milliseconds[side]:.3f} ms"]
    if side in row.share:
        words.append(f"{100 * row.share[side]:.1f} %")
    if side in row.peak:
        words.append(f"{row.peak[side] / 2**20:,.0f} MiB")
    if side in row.against and row.against[side].verdict != FEW:
        words.append(row.against[side].verdict)
    return ", ".join(words)


def described(benchmark: str, device: str, rows: Sequence[Row], unfinished: Sequence[str] = ()) -> Facts:
    """Return a run as JSON-ready values: what `circumstances` says, the ops not yet done, and the rows."""
    facts = circumstances(
        benchmark, device, copy_bytes_per_second=bandwidth(device), unfinished=list(unfinished)
    )
    return {**facts, "rows": [asdict(row) for row in rows]}


def circumstances(benchmark: str, device: str, **more: object) -> Facts:
    """Return what every record says of its run: device, versions, date and command; and ``more``."""
    return {
        "benchmark": benchmark,
        "device": accelerator.module(device).get_device_name() if device in accelerator.TYPES else "cpu",
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, {platform.system()}",
        "python": platform.python_version(),
        **{name: installed(name) or "not installed" for name in _VERSIONS},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", *sys.orig_argv[1:]]),
        **more,
    }


def write(facts: Facts, path: Path) -> None:
    """Write a run to a JSON file, which is the old one or the new one whole at every moment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    part.replace(path)


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
