"""Several implementations of one operation beside each other on a CUDA device, and the physical limit.

Times are medians of CUDA events, by turns in one process. Before each call the device is given something to
do that empties the caches, so that the host is ahead and no launch is timed. The limit is the bandwidth of a
copy of 2 GiB in the same run (bytes read plus bytes written).
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

__all__ = ["Row", "bandwidth", "by_turns", "described", "host_time", "record", "wall_time"]

RESULTS = Path(__file__).resolve().parent / "results"
ROUNDS = 20


@dataclass(frozen=True)
class Row:
    """One part of one operation at one size.

    Attributes:
        op, part, dtype, shape: what was measured.
        bytes: the fewest that device memory has to move.
        milliseconds: the median by implementation; what cannot do it is not there.
        share: of the copy's bandwidth, by implementation.
    """

    op: str
    part: str
    dtype: str
    shape: str
    bytes: int
    milliseconds: Mapping[str, float]
    share: Mapping[str, float]


def bandwidth() -> float:
    """Return bytes a second of a copy."""
    source = torch.randn(1 << 29, device="cuda", dtype=torch.float32)
    target = torch.empty_like(source)
    (median,) = by_turns({"copy": lambda: target.copy_(source)}).values()
    return 2 * source.nbytes / median * 1e3


def by_turns(sides: Mapping[str, Callable[[], object]], rounds: int = ROUNDS) -> dict[str, float]:
    """Return the median milliseconds of each side."""
    busy = torch.empty(1 << 28, device="cuda", dtype=torch.float32)
    for _ in range(3):
        for side in sides.values():
            side()
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            busy.zero_()
            busy.zero_()
            start.record()
            side()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end))
    return {name: statistics.median(taken) for name, taken in times.items()}


def host_time(side: Callable[[], object], calls: int = 200) -> float:
    """Return the milliseconds that a call takes on the host, the device not waited for."""
    return _repeated(side, calls, waited=False)


def wall_time(side: Callable[[], object], calls: int = 100) -> float:
    """Return the milliseconds of a call when many follow each other: the longer of host and device."""
    return _repeated(side, calls, waited=True)


def _repeated(side: Callable[[], object], calls: int, *, waited: bool) -> float:
    for _ in range(3):
        side()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(calls):
        side()
    if waited:
        torch.cuda.synchronize()
    taken = time.perf_counter() - began
    torch.cuda.synchronize()
    return taken / calls * 1e3


def record(benchmark: str, rows: Sequence[Row], **more: object) -> None:
    """Print the rows as a table and write them to ``results/<benchmark>.json``."""
    names = list(dict.fromkeys(name for row in rows for name in row.milliseconds))
    print(f"{'op':12}{'part':24}{'dtype':10}{'shape':18}" + "".join(f"{name:>20}" for name in names))
    for row in rows:
        cells = [
            f"{row.milliseconds[name]:.3f} ms {100 * row.share[name]:5.1f} %" if name in row.share else "-"
            for name in names
        ]
        text = "".join(f"{cell:>20}" for cell in cells)
        print(f"{row.op:12}{row.part:24}{row.dtype:10}{row.shape:18}{text}")
    found = {**described(benchmark, **more), "rows": [asdict(row) for row in rows]}
    RESULTS.mkdir(exist_ok=True)
    target = RESULTS / f"{benchmark}.json"
    target.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print(f"written: {target.relative_to(RESULTS.parent.parent)}")


def described(benchmark: str, **more: object) -> dict[str, object]:
    """Return what every record says of its run: device, versions, date and command; and ``more``."""
    return {
        "benchmark": benchmark,
        "device": torch.cuda.get_device_name(),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, {platform.system()}",
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "triton", "transformers", "liger_kernel")},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", *sys.orig_argv[1:]]),
        **more,
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
