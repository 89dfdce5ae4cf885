"""Recorded benchmarks as bars: of a page's ops, and of training steps of its models.

A checkout has records in `benchmarks/results`; an installed wheel has none.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from veomni_hook.tools.facts import Facts

__all__ = ["Bar", "Chart", "by_place", "charts", "results_folder", "step_of"]

#: Complete training steps by the name of their benchmark: the family, and what was run.
_STEPS = {
    "qwen3_8b_step_gpu": (
        "qwen3",
        "A training step of Qwen3-8B's shapes with 4 layers, 4 x 4,096 tokens, bfloat16",
    ),
    "qwen3_30b_a3b_step_gpu": (
        "qwen3_moe",
        "A training step of Qwen3-30B-A3B's shapes with 4 layers, 4 x 4,096 tokens, bfloat16",
    ),
}
_PARTS = ("forward", "backward", "step")
_NAMES = {
    "eager": "upstream",
    "compile": "torch.compile",
    "liger": "Liger",
    "quack": "QuACK",
    "sonic": "SonicMoE",
    "ours": "veomni-hook",
    "ours+compile": "veomni-hook, compiled",
    "floor": "matrix products and attention alone",
}


@dataclass(frozen=True)
class Bar:
    """One side of a comparison: its name, its time, and its other measurements as text."""

    name: str
    milliseconds: float
    more: str
    own: bool

    @property
    def time(self) -> str:
        """The time as text."""
        if self.milliseconds >= 10_000:
            return f"{self.milliseconds / 1000:,.1f} s"
        digits = next(
            (digits for digits, least in enumerate((100, 10, 0.1)) if self.milliseconds >= least), 3
        )
        return f"{self.milliseconds:,.{digits}f} ms"


@dataclass(frozen=True)
class Chart:
    """Sides that were measured alternately in one run.

    Attributes:
        title: what was measured.
        where: device, versions and date.
        first: whether it is the first of its op and device; the others are folded.
        bars: the sides.
        step: whether it is of a complete training step.
    """

    title: str
    where: str
    first: bool
    bars: tuple[Bar, ...]
    step: bool = False

    @property
    def longest(self) -> float:
        """The time of the slowest side."""
        return max(bar.milliseconds for bar in self.bars)


def results_folder() -> Path | None:
    """Return the folder of the records in a checkout of this project; None in an installed package."""
    root = Path(__file__).resolve().parents[3]
    folder = root / "benchmarks" / "results"
    return folder if (root / "pyproject.toml").is_file() and folder.is_dir() else None


def charts(folder: Path, ops: Iterable[str], families: Iterable[str], *, cpu: bool) -> list[Chart]:
    """Return the records of ops and families; those of this kind of machine come first.

    Args:
        folder: the folder of the records.
        ops: the names of ops.
        families: short names of modeling modules.
        cpu: whether CPU records come before accelerator records.

    Raises:
        ValueError: a file in the folder is not a record of a benchmark.
    """
    wanted, known = set(ops), set(families)
    records = [_read(file) for file in sorted(folder.glob("*.json"))]
    records.sort(key=lambda record: (record.get("device") == "cpu") is not cpu)
    steps = [chart for record in records for chart in _step(record, known)]
    return [*steps, *(chart for record in records for chart in _ops(record, wanted))]


def by_place(every_chart: Sequence[Chart]) -> Iterator[tuple[str, list[Chart], list[Chart]]]:
    """Yield each device and run with its charts: the first ones of their ops, and the folded ones."""
    for where in dict.fromkeys(chart.where for chart in every_chart):
        here = [chart for chart in every_chart if chart.where == where]
        yield where, [chart for chart in here if chart.first], [chart for chart in here if not chart.first]


def step_of(every_chart: Iterable[Chart]) -> Iterator[tuple[str, str, str]]:
    """Yield the time and the memory of the first recorded training step that has upstream's beside ours."""
    for chart in every_chart:
        sides = {bar.name: bar for bar in chart.bars if bar.own or bar.name == _NAMES["eager"]}
        if chart.step and len(sides) == len(("upstream", "ours")):
            other, own = sorted(sides.values(), key=lambda bar: bar.own)
            what, device = chart.title.partition(";")[0], chart.where.partition(",")[0]
            yield "Time, recorded", own.time, f"{other.time} without the hook. {what}, {device}"
            if own.more and other.more:
                yield "Memory, recorded", own.more, f"{other.more} without the hook"
            return


def _read(file: Path) -> Facts:
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is no record of a benchmark: {error}") from error
    if not isinstance(record, dict):
        raise ValueError(f"{file} is no record of a benchmark")
    return record


def _where(record: Facts) -> str:
    device, machine = record["device"], record["machine"]
    place = machine if device == "cpu" else device
    versions = f"torch {record['torch']}, transformers {record['transformers']}"
    return f"{place}, {versions}, {str(record['date'])[:10]}"


def _step(record: Facts, families: set[str]) -> Iterator[Chart]:
    family, title = _STEPS.get(str(record.get("benchmark")), ("", ""))
    sides = record.get("sides", {})
    if family not in families or not sides:
        return
    bars = tuple(
        Bar(
            _named(name),
            one["step_ms"],
            f"{one['extra_gib']:g} GiB" if "extra_gib" in one else "",
            name == "ours",
        )
        for name, one in sides.items()
    )
    yield Chart(
        f"{title}; attention: {record['attention']}", _where(record), "ours" in sides, bars, step=True
    )


def _ops(record: Facts, ops: set[str]) -> Iterator[Chart]:
    """The charts of a record of `veomni-hook bench`; the first size of each op is not folded."""
    first: dict[str, str] = {}
    for row in record.get("rows", ()):
        if row.get("op") not in ops or row["part"] not in _PARTS or not row["milliseconds"]:
            continue
        shape = first.setdefault(row["op"], row["shape"])
        memory = {name: f"{peak / 2**30:.2g} GiB" for name, peak in row.get("peak", {}).items()}
        bars = tuple(
            Bar(_named(name), taken, memory.get(name, ""), name == "ours")
            for name, taken in row["milliseconds"].items()
        )
        title = f"{row['op']}, {row['part']}: {row['shape']}, {row['dtype']}"
        yield Chart(title, _where(record), row["shape"] == shape, bars)


def _named(side: str) -> str:
    name, comma, more = side.partition(",")
    return f"{_NAMES.get(name, name)}{comma}{more}"
