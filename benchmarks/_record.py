"""One table and one JSON file for benchmarks of kernels: upstream and ours, side by side from one run."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results"


@dataclass(frozen=True)
class Case:
    """One operation at one size: the best and the median of both, in ``unit``."""

    op: str
    part: str
    dtype: str
    shape: str
    upstream: float
    ours: float
    upstream_median: float
    ours_median: float
    unit: str = "ms"

    @property
    def ratio(self) -> float:
        """How many times less ours takes, by medians."""
        return self.upstream_median / self.ours_median


def write(benchmark: str, device: str, measured: Iterable[Case]) -> None:
    """Print cases as they come, as a table, and record them in ``results/<benchmark>.json``."""
    print(f"{'op':22}{'part':20}{'dtype':10}{'shape':28}{'upstream':>12}{'ours':>12}{'upstream/ours':>15}")
    cases = []
    for case in measured:
        name = f"{case.op:22}{case.part:20}{case.dtype:10}{case.shape:28}"
        numbers = f"{case.upstream_median:>12.2f}{case.ours_median:>12.2f}{case.ratio:>15.2f}"
        print(f"{name}{numbers}  {case.unit}", flush=True)
        cases.append(case)
    record = {
        "benchmark": benchmark,
        "device": device,
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, {platform.system()}",
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", *sys.orig_argv[1:]]),
        "cases": [{**asdict(case), "ratio": round(case.ratio, 3)} for case in cases],
    }
    RESULTS.mkdir(exist_ok=True)
    target = RESULTS / f"{benchmark}.json"
    target.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(f"written: {target.relative_to(RESULTS.parent.parent)}")
