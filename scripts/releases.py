"""The idioms over many transformers releases: `python -m scripts.releases [RELEASE...]`, or `make releases`.

Downloads each release's wheel, unpacks it, does what `veomni-hook coverage --source` does (nothing is
installed or imported), writes the tables to docs/releases.md, and fails where a share is below the promise.

The second table answers what a release costs that nobody has looked at: the newer releases with only those
formulas that releases up to `FROZEN` contain.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from veomni_hook.cli.coverage import examined
from veomni_hook.patches.coverage import ERROR, ROUTED, Row, Total, totals
from veomni_hook.patches.routes.site import Status

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

#: The last release whose formulas the second table knows, and by how many points newer ones may be below it.
FROZEN = "5.17.0"
LOSS = {
    "rms_norm": 2.0,
    "rotary": 2.0,
    "gated_mlp": 2.0,
    "moe_experts": 6.0,
    "linear_cross_entropy/causal_lm": 6.0,
}

Totals = Mapping[str, Total]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run over the releases named, or all; return 1 where a share is too low."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("releases", nargs="*", default=RELEASES, metavar="RELEASE")
    parser.add_argument(
        "--wheels", type=Path, default=WHEELS, help="where wheels are kept (default: %(default)s)"
    )
    chosen = parser.parse_args(arguments)
    rows: dict[str, list[Row]] = {}
    for release in chosen.releases:
        print(f"transformers {release}", file=sys.stderr, flush=True)
        rows[release] = judged(wheel(release, chosen.wheels))
    found = {release: by_op(held) for release, held in rows.items()}
    lines = table(found)
    print("\n".join(lines))
    short = shortfalls(found, newest=RELEASES[-1])
    if tuple(chosen.releases) == RELEASES:
        unseen = frozen(rows)
        short += losses(found[FROZEN], unseen)
        TABLE.write_text(document(lines, table({FROZEN: found[FROZEN]} | unseen)), encoding="utf-8")
        print(f"written: {TABLE.relative_to(ROOT)}", file=sys.stderr)
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


def judged(path: Path) -> list[Row]:
    """Return every site of the package in a wheel."""
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(path) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if name.endswith(".py")])
        rows = examined((), folder, None)
    failed = [row for row in rows if row.status == ERROR]
    if failed:
        raise SystemExit(f"{path.name}: {failed[0].module}: {failed[0].reason}")
    return rows


def by_op(rows: Sequence[Row]) -> Totals:
    """Return the totals of `veomni-hook coverage` by op."""
    return {total.op: total for total in totals(rows)}


def frozen(rows: Mapping[str, Sequence[Row]]) -> dict[str, Totals]:
    """Return the totals of releases after `FROZEN` without the formulas that only they contain."""
    releases = list(rows)
    newer = releases[releases.index(FROZEN) + 1 :]
    known = {
        (row.op, variant)
        for release in releases
        if release not in newer
        for row in rows[release]
        if row.status == ROUTED
        for variant in row.variant.split("|")
    }

    def unseen(row: Row) -> Row:
        new = any((row.op, variant) not in known for variant in row.variant.split("|"))
        return replace(row, status=Status.MISSED.value) if row.status == ROUTED and new else row

    return {release: by_op([unseen(row) for row in rows[release]]) for release in newer}


def losses(base: Totals, unseen: Mapping[str, Totals]) -> list[str]:
    """Return, in words, where a newer release is further below `FROZEN` than may be."""
    return [
        f"{op} in {release} with the formulas of {FROZEN}: {held[op].share:.1f} %, "
        f"{base[op].share:.1f} % there"
        for release, held in unseen.items()
        for op, allowed in LOSS.items()
        if held[op].share < base[op].share - allowed
    ]


def shortfalls(found: Mapping[str, Totals], *, newest: str) -> list[str]:
    """Return what is below the promise, in words."""
    short = []
    for release, held in found.items():
        for op, required in REQUIRED.items():
            wanted = required if release == newest else required - SLACK
            share = held[op].share if op in held else 0.0
            if share < wanted:
                short.append(f"{op} in {release}: {share:.1f} %, promised are {wanted:g} %")
    return short


def table(found: Mapping[str, Totals]) -> list[str]:
    """Return the shares as a table in Markdown: a row for each op, a column for each release."""
    ops: Iterable[str] = dict.fromkeys(op for held in found.values() for op in held)
    rows = [f"| op | {' | '.join(found)} |", f"|---|{'---|' * len(found)}"]
    for op in ops:
        rows.append(f"| {op} | {' | '.join(_cell(held.get(op)) for held in found.values())} |")
    return rows


def document(lines: Sequence[str], unseen: Sequence[str]) -> str:
    """Return the text of docs/releases.md."""
    today = datetime.now(UTC).date().isoformat()
    head = (
        "# Coverage by release",
        "",
        f"Written by `make releases` on {today}: candidates that are recognised and have a kernel slot,",
        "in per cent, with their numbers. What counts as a candidate: [coverage.md](coverage.md). Formulas",
        "that no machine has a kernel for are among them; `veomni-hook coverage` counts these apart",
        "(`no_kernel`).",
        "",
    )
    middle = (
        "",
        "## What a new release costs",
        "",
        f"The same idioms, with only those formulas that releases up to {FROZEN} contain: about what a user",
        "of the newer releases would have had on their first day. Formulas are told by variant; how code is",
        "brought into canonical form is today's, so this is a simulation and no blind run.",
        "",
    )
    return "\n".join([*head, *lines, *middle, *unseen]) + "\n"


def _cell(total: Total | None) -> str:
    if total is None or not total.candidates:
        return "-"
    return f"{total.share:.1f} ({total.routed}/{total.candidates})"


if __name__ == "__main__":
    sys.exit(main())
