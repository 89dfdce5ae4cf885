"""Kernels of two checkouts: `python -m benchmarks.bench_against --against CHECKOUT [OP...]`.

`veomni-hook bench --quick --side SIDE`, with this checkout and with one of an earlier commit by turns, op by
op. Times are the best of all rounds. Entries named host or wall contain the host's time and vary by tens of
per cent on most machines; the others are the device's. Rows are printed, and the record is written, after
each op.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
ROUNDS = 2


def main() -> None:
    """Measure both checkouts by turns, print a table and record it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ops", nargs="*", metavar="OP", help="default: all")
    parser.add_argument("--against", type=Path, required=True, help="a checkout of an earlier commit")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--side", default="ours", help="default: ours")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    out = options.out or RESULTS / f"bench_against-{options.device}.json"
    sides = {"before": _worker(options.against.resolve()), "now": _worker(ROOT)}
    best: dict[str, dict[str, float]] = {"before": {}, "now": {}}
    of_device: list[float] = []
    for op in options.ops or _ops():
        facts, rows = _by_turns(sides, op, options.side, options.device)
        for side, entries in rows.items():
            best[side] |= entries
        for entry, before in rows["before"].items():
            if (now := rows["now"].get(entry)) is not None:
                print(f"{now / before:6.3f} {before:9.4f} {now:9.4f} ms  {entry}", flush=True)
                if entry.split()[1] not in ("host", "wall"):
                    of_device.append(now / before)
        command = f"python -m benchmarks.bench_against --against CHECKOUT --side {options.side}"
        record = {**facts, "benchmark": "bench_against", "command": " ".join([command, *options.ops])}
        out.write_text(json.dumps({**record, "milliseconds": best}, indent=1) + "\n")
    print(f"{len(of_device)} entries of the device: median {statistics.median(of_device):.4f}, ", end="")
    print(f"{min(of_device):.3f} to {max(of_device):.3f}")


def _ops() -> list[str]:
    from veomni_hook.tools.bench.cases import benchmarks

    return [*benchmarks()]


def _worker(checkout: Path) -> subprocess.Popen[str]:
    # -P: without this file's folder. Of the other checkout comes everything but this script.
    return subprocess.Popen(
        [sys.executable, "-P", __file__, "--measure"],
        env=os.environ | {"PYTHONPATH": str(checkout)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _by_turns(
    sides: dict[str, subprocess.Popen[str]], op: str, implementation: str, device: str
) -> tuple[dict[str, Any], dict[str, dict[str, float]]]:
    """What the last run says of the machine, and the best time of every entry by side."""
    best: dict[str, dict[str, float]] = defaultdict(dict)
    facts: dict[str, Any] = {}
    for _ in range(ROUNDS):
        for side, worker in sides.items():
            assert worker.stdin and worker.stdout
            print(op, implementation, device, file=worker.stdin, flush=True)
            facts = json.loads(worker.stdout.readline())
            for row in facts.pop("rows"):
                for name, milliseconds in row["milliseconds"].items():
                    entry = f"{row['op']} {row['part']} {row['dtype']} {row['shape']}: {name}"
                    best[side][entry] = min(milliseconds, best[side].get(entry, milliseconds))
    return facts, best


def measure() -> None:
    """Run the command of the package that can be imported for every op that is asked for."""
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        for line in sys.stdin:
            op, side, device = line.split()
            sys.argv = ["", "bench", op, "--quick", "--side", side, "--device", device, "--out", out.name]
            with contextlib.redirect_stdout(sys.stderr), contextlib.suppress(SystemExit):
                runpy.run_module("veomni_hook", run_name="__main__")
            print(json.dumps(json.loads(Path(out.name).read_text())), flush=True)


if __name__ == "__main__":
    measure() if sys.argv[1:2] == ["--measure"] else main()
