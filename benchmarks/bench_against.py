"""Kernels of two checkouts: `python -m benchmarks.bench_against --against CHECKOUT [OP...]`.

Our side of `veomni-hook bench --quick`, with this checkout and with another one of an earlier commit by
turns, in one run. Times are the best of all rounds. Entries named host or wall contain the host's time and
vary by tens of per cent on most machines; the others are the device's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
ROUNDS = 2
PEERS = ("eager", "compile", "liger", "quack", "sonic")


def main() -> None:
    """Measure both checkouts by turns, print a table and record it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ops", nargs="*", metavar="OP", help="default: all")
    parser.add_argument("--against", type=Path, required=True, help="a checkout of an earlier commit")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    best: dict[str, dict[str, float]] = {"before": {}, "now": {}}
    facts: dict[str, Any] = {}
    for _ in range(ROUNDS):
        for side, checkout in (("before", options.against.resolve()), ("now", ROOT)):
            facts = _run(checkout, options.device, options.ops)
            for row in facts.pop("rows"):
                for name, milliseconds in row["milliseconds"].items():
                    entry = f"{row['op']} {row['part']} {row['dtype']} {row['shape']}: {name}"
                    best[side][entry] = min(milliseconds, best[side].get(entry, milliseconds))
    ratios = {name: best["now"][name] / time for name, time in best["before"].items() if name in best["now"]}
    for name, ratio in sorted(ratios.items(), key=lambda item: item[1]):
        print(f"{ratio:6.3f} {best['before'][name]:9.4f} {best['now'][name]:9.4f} ms  {name}")
    of_device = [ratio for name, ratio in ratios.items() if name.split()[1] not in ("host", "wall")]
    print(f"{len(of_device)} entries of the device: median {statistics.median(of_device):.4f}, ", end="")
    print(f"{min(of_device):.3f} to {max(of_device):.3f}")
    out = options.out or RESULTS / f"bench_against-{options.device}.json"
    command = "python -m benchmarks.bench_against --against CHECKOUT"
    record = {**facts, "command": " ".join([command, *options.ops]), "milliseconds": best}
    out.write_text(json.dumps(record, indent=1) + "\n")


def _run(checkout: Path, device: str, ops: list[str]) -> dict[str, Any]:
    # -P: without this file's folder. Of the other checkout comes everything but this script.
    command = [sys.executable, "-P", __file__, "--measure", device, *ops]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(checkout)}, check=True, stdout=subprocess.PIPE
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def measure(device: str, ops: list[str]) -> dict[str, Any]:
    """Return the machine and the rows of the package that can be imported."""
    import torch

    from veomni_hook.tools.bench import record
    from veomni_hook.tools.bench.cases import benchmarks, problems
    from veomni_hook.tools.bench.run import measured

    torch.manual_seed(0)
    ours = (
        replace(one, sides={name: one.sides[name] for name in one.sides if name.split(",")[0] not in PEERS})
        for op in ops or benchmarks()
        for one in problems(op, device, quick=True)
    )
    rows = list(measured(ours, device))
    facts = record.described(", ".join(ops or benchmarks()), device, rows, [])
    return {**facts, "rows": [asdict(row) for row in rows]}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        print(json.dumps(measure(sys.argv[2], sys.argv[3:])))
    else:
        main()
