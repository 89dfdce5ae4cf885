"""Checks idioms on many transformers releases: `python -m scripts.releases [RELEASE...]`, or `make releases`.

Downloads and unpacks each release's wheel, does the same as `veomni-hook list --by op --source` (nothing is
installed or imported), writes the tables to docs/releases.md, and fails if a share is below its limit.

The second table shows the coverage of a release on its first day: newer releases with only the formulas that
releases up to `FROZEN` contain.
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

from packaging.version import Version

from veomni_hook.patches.site import Status
from veomni_hook.releases import TESTED
from veomni_hook.tools.cli.inputs.sources import source_tree
from veomni_hook.tools.cli.sites.table import examined, rows_of
from veomni_hook.tools.coverage import ERROR, ROUTED, Row, Total, totals

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "docs" / "releases.md"
WHEELS = ROOT / "build" / "wheels"

#: Those that the tests run on, and some between.
RELEASES = tuple(
    sorted((*TESTED["transformers"], "5.5.4", "5.12.1", "5.14.1", "5.20.2", "5.22.2"), key=Version)
)
#: The minimum share, in percent, for the newest release.
REQUIRED = {
    "rms_norm": 98.0,
    "rotary": 94.0,
    "gated_mlp": 97.0,
    "moe_experts": 90.0,
    "linear_cross_entropy/causal_lm": 92.0,
}
#: How many points below that any other release may be.
SLACK = 3.0

#: The last release whose formulas the second table uses, and how many points below it newer ones may be.
FROZEN = "5.17.0"
LOSS = {
    "rms_norm": 2.0,
    "rotary": 2.0,
    "gated_mlp": 2.0,
    "moe_experts": 6.0,
    "linear_cross_entropy/causal_lm": 6.0,
}

#: What sequence parallelism asks; its share says nothing, so it has a table of its own.
LOOPS = "layer_loop/base_model"

Totals = Mapping[str, Total]


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the named releases, or all; return 1 if a share is too low."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("releases", nargs="*", default=RELEASES, metavar="RELEASE")
    parser.add_argument(
        "--wheels", type=Path, default=WHEELS, help="the folder for wheels (default: %(default)s)"
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
        page = document(lines, table({FROZEN: found[FROZEN]} | unseen), loops(found))
        TABLE.write_text(page, encoding="utf-8")
        print(f"written: {TABLE.relative_to(ROOT)}", file=sys.stderr)
    for one in short:
        print(f"too low: {one}", file=sys.stderr)
    return int(bool(short))


def wheel(release: str, folder: Path) -> Path:
    """Return the wheel of a release; download it if it is missing."""
    path = folder / f"transformers-{release}-py3-none-any.whl"
    if not path.exists():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        subprocess.run([*command, "--dest", str(folder), f"transformers=={release}"], check=True)
    return path


def judged(path: Path) -> list[Row]:
    """Return the rows of all candidates in a wheel's package."""
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(path) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if name.endswith(".py")])
        rows = rows_of(examined(source_tree(folder).files()))
    failed = [row for row in rows if row.status == ERROR]
    if failed:
        raise SystemExit(f"{path.name}: {failed[0].module}: {failed[0].reason}")
    return rows


def by_op(rows: Sequence[Row]) -> Totals:
    """Return the totals of `veomni-hook list --by op`."""
    return {total.op: total for total in totals(rows)}


def frozen(rows: Mapping[str, Sequence[Row]]) -> dict[str, Totals]:
    """Return the totals of releases after `FROZEN`, where formulas new in them count as missed."""
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
    """Return messages about newer releases that are too far below `FROZEN`."""
    return [
        f"{op} in {release} with only the formulas up to {FROZEN}: {held[op].share:.1f} %, "
        f"{base[op].share:.1f} % in {FROZEN}"
        for release, held in unseen.items()
        for op, allowed in LOSS.items()
        if held[op].share < base[op].share - allowed
    ]


def shortfalls(found: Mapping[str, Totals], *, newest: str) -> list[str]:
    """Return messages about shares below their limit, and about loops that are neither routed nor refused."""
    short = [
        f"{LOOPS} in {release}: {total.candidates - total.routed - total.refused} without a verdict"
        for release, held in found.items()
        if (total := held.get(LOOPS)) is not None and total.candidates != total.routed + total.refused
    ]
    for release, held in found.items():
        for op, required in REQUIRED.items():
            wanted = required if release == newest else required - SLACK
            share = held[op].share if op in held else 0.0
            if share < wanted:
                short.append(f"{op} in {release}: {share:.1f} %, but {wanted:g} % are required")
    return short


def table(found: Mapping[str, Totals]) -> list[str]:
    """Return the shares as a table in Markdown: a row for each op, a column for each release."""
    ops: Iterable[str] = dict.fromkeys(op for held in found.values() for op in held if not _is_loop(op))
    rows = [f"| op | {' | '.join(found)} |", f"|---|{'---|' * len(found)}"]
    for op in ops:
        rows.append(f"| {op} | {' | '.join(_cell(held.get(op)) for held in found.values())} |")
    return rows


def loops(found: Mapping[str, Totals]) -> list[str]:
    """Return the loops of base models as a table: a row for each outcome, a column for each release."""
    held = [each[LOOPS] for each in found.values()]
    counts = {
        "can be split": [total.routed for total in held],
        "refused with a reason": [total.refused for total in held],
        "neither": [total.candidates - total.routed - total.refused for total in held],
    }
    rows = [f"| base models | {' | '.join(found)} |", f"|---|{'---|' * len(found)}"]
    return rows + [f"| {name} | {' | '.join(map(str, numbers))} |" for name, numbers in counts.items()]


def document(lines: Sequence[str], unseen: Sequence[str], split: Sequence[str]) -> str:
    """Return the text of docs/releases.md."""
    today = datetime.now(UTC).date().isoformat()
    head = (
        "# Coverage by release",
        "",
        f"`make releases` wrote this page on {today}. Each cell has the percentage of candidates that are",
        "recognised and have a kernel slot, and the numbers. [coverage.md](coverage.md) defines candidates.",
        "Formulas without a kernel on any machine are included; `veomni-hook list --by op` counts them apart",
        "(`no_kernel`).",
        "",
    )
    middle = (
        "",
        "## Coverage on the first day of a release",
        "",
        f"The same idioms, with only the formulas that releases up to {FROZEN} contain: roughly what users",
        "of the newer releases would have had on the first day. Formulas are distinguished by variant, and",
        "code is normalised by today's rules, so this is a simulation.",
        "",
    )
    last = (
        "",
        "## Sequence parallelism",
        "",
        "Loops over layers whose code was proven to work on each position by itself, so that processes can",
        "share sequences ([parallel](parallel.md)), and those that are refused. Towers, which take no",
        "`input_ids` and run whole in each process, are not counted.",
        "",
    )
    return "\n".join([*head, *lines, *middle, *unseen, *last, *split]) + "\n"


def _is_loop(op: str) -> bool:
    return op.partition("/")[0] == LOOPS.partition("/")[0]


def _cell(total: Total | None) -> str:
    if total is None or not total.candidates:
        return "-"
    return f"{total.share:.1f} ({total.routed}/{total.candidates})"


if __name__ == "__main__":
    sys.exit(main())
