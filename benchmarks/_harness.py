"""What every benchmark shares: fresh interpreters, robust timing, one table and one JSON file of results.

Each row is one quantity beside its baseline from the same run: machines differ, ratios travel. A row with a
budget passes or fails; a script exits with 1 when one fails.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks._record import RESULTS

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Row:
    """One measured quantity.

    Attributes:
        name: what was measured.
        value: the best of its repetitions, in `unit`.
        unit: `ms`, `µs`, …
        baseline: the same work without us, in the same run; None where there is no such thing.
        baseline_name: what the baseline is.
        budget: the most that `judged` may be; None where nothing is promised.
        judged: the number that the budget is about (`value - baseline`, say); `value` by default.
    """

    name: str
    value: float
    unit: str
    baseline: float | None = None
    baseline_name: str = ""
    budget: float | None = None
    judged: float | None = None

    @property
    def ratio(self) -> float | None:
        """Value over baseline."""
        return self.value / self.baseline if self.baseline else None

    @property
    def passed(self) -> bool | None:
        """Whether the budget holds; None without one."""
        if self.budget is None:
            return None
        return (self.value if self.judged is None else self.judged) <= self.budget


def timed(call: Callable[[], object]) -> float:
    """Return the seconds of one call; the garbage of earlier rounds is not collected on its time."""
    gc.collect()
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def in_fresh_interpreter(arguments: list[str], environment: dict[str, str] | None = None) -> Any:
    """Run this interpreter with ``arguments`` in the repository's root; its last line of output is JSON."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("VEOMNI_")}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**variables, "HF_HUB_OFFLINE": "1", **(environment or {})},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.stderr.write(done.stderr)
        raise SystemExit(f"{' '.join(arguments)} ended with status {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def finish(benchmark: str, rows: list[Row], device: str = "cpu") -> None:
    """Print the table, write `results/<benchmark>-<device>.json`, and exit with 1 if a budget was missed."""
    width = max(len(row.name) for row in rows)
    print(f"{benchmark} on {device}: the best of many repetitions")
    print(f"  {'':{width}}  {'measured':>12}  {'baseline':>12}  {'ratio':>7}  budget")
    for row in rows:
        print(f"  {row.name:{width}}  {_line(row)}")
    record = {
        "benchmark": benchmark,
        "device": device,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", *sys.orig_argv[1:]]),
        "environment": _environment(),
        "rows": [{**asdict(row), "ratio": row.ratio, "passed": row.passed} for row in rows],
    }
    RESULTS.mkdir(exist_ok=True)
    target = RESULTS / f"{benchmark}-{device}.json"
    target.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"written: {target.relative_to(ROOT)}")
    if any(row.passed is False for row in rows):
        raise SystemExit(1)


def _line(row: Row) -> str:
    baseline = "" if row.baseline is None else f"{row.baseline:.3f} {row.unit}"
    ratio = "" if row.ratio is None else f"{row.ratio:.2f}x"
    verdict = ""
    if row.budget is not None:
        shown = row.value if row.judged is None else row.judged
        verdict = f"{shown:.3f} <= {row.budget:g} {row.unit}: {'ok' if row.passed else 'MISSED'}"
    return f"{row.value:>9.3f} {row.unit}  {baseline:>12}  {ratio:>7}  {verdict}".rstrip()


def _environment() -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "cpus": os.cpu_count(),
        # Well above 1: something else ran, and differences of milliseconds mean little.
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "transformers": version("transformers"),
        "torch": version("torch"),
        "veomni_hook": version("veomni-hook") if _installed() else "checkout",
    }


def _installed() -> bool:
    from importlib.metadata import PackageNotFoundError

    try:
        version("veomni-hook")
    except PackageNotFoundError:
        return False
    return True
