"""The idioms over many transformers releases: `python -m scripts.releases [RELEASE...]`, or `make releases`.

Downloads each release's wheel, unpacks it, runs `veomni-hook coverage --source` over it (nothing is installed
or imported), writes the table to docs/releases.md, and fails where a share is below what is promised.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "docs" / "releases.md"
WHEELS = ROOT / "build" / "wheels"

RELEASES = ("5.2.0", "5.5.4", "5.9.0", "5.12.1", "5.14.1", "5.17.0", "5.20.2", "5.22.2", "5.23.0")
#: Shares in per cent that the newest release has to reach.
REQUIRED = {
    "rms_norm": 98.0,
    "rotary": 94.0,
    "gated_mlp": 97.0,
    "moe_experts": 90.0,
    "linear_cross_entropy/causal_lm": 92.0,
}
#: By how many points any other release may be below them.
SLACK = 3.0

Totals = Mapping[str, Mapping[str, Any]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run over the releases named, or all; return 1 where a share is too low."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("releases", nargs="*", default=RELEASES, metavar="RELEASE")
    parser.add_argument(
        "--wheels", type=Path, default=WHEELS, help="where wheels are kept (default: %(default)s)"
    )
    chosen = parser.parse_args(arguments)
    found: dict[str, Totals] = {}
    for release in chosen.releases:
        print(f"transformers {release}", file=sys.stderr, flush=True)
        found[release] = judged(wheel(release, chosen.wheels))
    lines = table(found)
    print("\n".join(lines))
    if tuple(chosen.releases) == RELEASES:
        TABLE.write_text(document(lines), encoding="utf-8")
        print(f"written: {TABLE.relative_to(ROOT)}", file=sys.stderr)
    short = shortfalls(found, newest=RELEASES[-1])
    for one in short:
        print(f"too low: {one}", file=sys.stderr)
    return int(bool(short))


def wheel(release: str, folder: Path) -> Path:
    """Return the wheel of a release, downloaded unless it is there."""
    path = folder / f"transformers-{release}-py3-none-any.whl"
    if not path.exists():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        subprocess.run([*command, "--dest", str(folder), f"transformers=={release}"], check=True)
    return path


def judged(path: Path) -> Totals:
    """Return the totals of `veomni-hook coverage` by op, for the package in a wheel."""
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(path) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if name.endswith(".py")])
        command = [sys.executable, "-m", "veomni_hook", "coverage", "--source", folder, "--totals", "--json"]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=False)
    if done.returncode:
        raise SystemExit(f"coverage of {path.name} ended with status {done.returncode}; stderr says why")
    return {total["op"]: total for total in json.loads(done.stdout)}


def shortfalls(found: Mapping[str, Totals], *, newest: str) -> list[str]:
    """Return what is below the promise, in words."""
    short = []
    for release, totals in found.items():
        for op, required in REQUIRED.items():
            wanted = required if release == newest else required - SLACK
            share = totals[op]["share"] if op in totals else 0.0
            if share < wanted:
                short.append(f"{op} in {release}: {share:.1f} %, promised are {wanted:g} %")
    return short


def table(found: Mapping[str, Totals]) -> list[str]:
    """Return the shares as a table in Markdown: a row for each op, a column for each release."""
    ops: Iterable[str] = dict.fromkeys(op for totals in found.values() for op in totals)
    rows = [f"| op | {' | '.join(found)} |", f"|---|{'---|' * len(found)}"]
    for op in ops:
        rows.append(f"| {op} | {' | '.join(_cell(totals.get(op)) for totals in found.values())} |")
    return rows


def document(lines: Sequence[str]) -> str:
    """Return the text of docs/releases.md."""
    today = datetime.now(UTC).date().isoformat()
    head = (
        "# Coverage by release",
        "",
        f"Written by `make releases` on {today}: routed candidates in per cent, with their numbers. What",
        "counts as a candidate: [coverage.md](coverage.md).",
        "",
    )
    return "\n".join([*head, *lines]) + "\n"


def _cell(total: Mapping[str, Any] | None) -> str:
    if total is None or not total["candidates"]:
        return "-"
    return f"{total['share']:.1f} ({total['routed']}/{total['candidates']})"


if __name__ == "__main__":
    sys.exit(main())
