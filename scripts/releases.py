"""Checks idioms on many transformers releases: `python -m scripts.releases [RELEASE...]`, or `make releases`.

Downloads and unpacks each release's wheel, does the same as `veomni-hook list --by op --source` (nothing is
installed or imported), writes docs/data/releases.json, and fails if a share is below its limit.

Rows with only the formulas that releases up to `FROZEN` contain show the coverage of newer releases on their
first day.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from packaging.version import Version

from scripts import tables
from veomni_hook.patches.site import Status
from veomni_hook.releases import TESTED
from veomni_hook.tools.cli.inputs.release import downloaded
from veomni_hook.tools.cli.inputs.release import release as unpacked
from veomni_hook.tools.cli.sites.table import examined, rows_of
from veomni_hook.tools.coverage import ERROR, ROUTED, Row, Total, totals

ROOT = Path(__file__).resolve().parents[1]
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
    rows_shown = [*table(found), *loops(found)]
    short = shortfalls(found, newest=RELEASES[-1])
    if tuple(chosen.releases) == RELEASES:
        unseen = frozen(rows)
        short += losses(found[FROZEN], unseen)
        rows_shown += table(unseen, f"up to {FROZEN}", releases=found)
        tables.write("releases", rows_shown)
    print(tables.text(rows_shown), end="")
    for one in short:
        print(f"too low: {one}", file=sys.stderr)
    return int(bool(short))


def wheel(release: str, folder: Path) -> Path:
    """Return the wheel of a release; download it if it is missing."""
    path = folder / f"transformers-{release}-py3-none-any.whl"
    if not path.exists():
        downloaded(release, str(folder), "RELEASE")
    return path


def judged(path: Path) -> list[Row]:
    """Return the rows of all candidates in a wheel's package."""
    with unpacked(str(path), "wheel") as tree:
        rows = rows_of(examined(tree.files()))
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


def table(
    found: Mapping[str, Totals], formulas: str = "all", releases: Iterable[str] = ()
) -> Iterator[dict[str, str]]:
    """Yield a row for each op with the shares in each release; some of ``releases`` may have none."""
    for op in dict.fromkeys(op for held in found.values() for op in held if not _is_loop(op)):
        shares = {release: _cell(found.get(release, {}).get(op)) for release in releases or found}
        yield {"op": op, "formulas": formulas, **shares}


def loops(found: Mapping[str, Totals]) -> Iterator[dict[str, str]]:
    """Yield a row for each outcome of the loops of base models, with their numbers in each release."""
    held = {release: by_op_of[LOOPS] for release, by_op_of in found.items()}
    counts = {
        "can be split": {name: total.routed for name, total in held.items()},
        "refused with a reason": {name: total.refused for name, total in held.items()},
        "neither": {name: total.candidates - total.routed - total.refused for name, total in held.items()},
    }
    for outcome, numbers in counts.items():
        yield {
            "op": f"{LOOPS}: {outcome}",
            "formulas": "all",
            **{name: str(number) for name, number in numbers.items()},
        }


def _is_loop(op: str) -> bool:
    return op.partition("/")[0] == LOOPS.partition("/")[0]


def _cell(total: Total | None) -> str:
    if total is None or not total.candidates:
        return "-"
    return f"{total.share:.1f} ({total.routed}/{total.candidates})"


if __name__ == "__main__":
    sys.exit(main())
