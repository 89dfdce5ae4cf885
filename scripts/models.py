"""docs/data/models.json: `python -m scripts.models` judges transformers releases as `make releases` does.

Downloads the wheels of releases that are not there, reads them as text, and writes a row for each family of
the newest: which ops are routed to kernels, by which formula, since which release, and what is not and why.
How many families have each op goes between the markers in docs/models.md.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts import tables
from scripts.releases import ROOT, WHEELS, judged, wheel
from veomni_hook.patches.idioms.recognise import OPTIONAL
from veomni_hook.patches.site import Status
from veomni_hook.releases import TESTED
from veomni_hook.tools.cli.inputs.targets import MODELS
from veomni_hook.tools.cli.sites.table import supplied
from veomni_hook.tools.coverage import NO_KERNEL, ROUTED, Row

DOCUMENT = ROOT / "docs" / "models.md"
#: The tested releases up to the one that development installs, so that a test can compare the page with it.
PINNED = re.findall(r"(?m)^transformers==(.+)$", (ROOT / "constraints-dev.txt").read_text(encoding="utf-8"))[
    0
]
RELEASES = TESTED["transformers"][: TESTED["transformers"].index(PINNED) + 1]
BEGIN = "<!-- written by python -m scripts.models -->\n"
NO_MODULE = "known formula, but no module there that a kernel could belong to"
LONGEST = 110

#: What applies only with a setting, and asks for no kernel.
WITHOUT_KERNELS = {name.partition(".")[0] for name in OPTIONAL}

#: The rows of one family that count, and the families of a release with these.
Families = Mapping[str, Sequence[Row]]


def by_family(rows: Iterable[Row]) -> Families:
    """Return the candidates of each family; modules that many models share belong to none."""
    found: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if row.op in WITHOUT_KERNELS:
            continue
        if row.counted and row.module.startswith(f"{MODELS}."):
            found[row.module.removeprefix(f"{MODELS}.").partition(".")[0]].append(row)
    return found


def routed(rows: Iterable[Row]) -> Counter[tuple[str, str]]:
    """Return how many places of a family are routed to a kernel, by op and formula."""
    return Counter(
        (row.op, variant) for row in rows if row.status == ROUTED for variant in row.variant.split("|")
    )


def not_routed(rows: Iterable[Row]) -> list[str]:
    """Return a line for each place of a family that no kernel computes."""
    found = (f"{row.op} {row.target}: {short(row)}" for row in rows if row.status != ROUTED)
    return list(dict.fromkeys(found))


def short(row: Row) -> str:
    """Return why a place is not routed, in a few words."""
    if row.status == NO_KERNEL:
        return f"no kernel for the formula {row.variant}"
    if row.status == Status.UNBOUND.value:
        return NO_MODULE
    reason = re.sub(r" \(line \d+\)", "", row.reason)
    return reason if len(reason) <= LONGEST else f"{reason[:LONGEST].rpartition(' ')[0]} …"


def cells(rows: Sequence[Row], since: Mapping[tuple[str, str], str] | None = None) -> dict[str, list[str]]:
    """Return what is routed in a family, with the later releases of ``since``, and what is not."""
    lines: dict[str, list[str]] = defaultdict(list)
    for (op, variant), number in sorted(routed(rows).items()):
        times = f" x{number}" if number > 1 else ""
        later = f" ({since[op, variant]})" if since and (op, variant) in since else ""
        lines[op].append(f"{variant or 'yes'}{times}{later}")
    told = [f"{op}: {', '.join(held)}" for op, held in lines.items()]
    return {"routed": told, "not routed": not_routed(rows)}


def table(found: Mapping[str, Families]) -> Iterator[dict[str, Any]]:
    """Yield a row for each family, for the releases in ``found``, oldest first."""
    newest = found[[*found][-1]]
    for family in sorted(newest):
        first = next(release for release, held in found.items() if family in held)
        since = {}
        for one in routed(newest[family]):
            release = next(name for name, held in found.items() if one in routed(held.get(family, ())))
            if release != first:
                since[one] = release
        yield {"family": family, "since": first, **cells(newest[family], since)}


def summary(found: Mapping[str, Families]) -> Iterator[str]:
    """Yield the lines of the table that counts families by op."""
    counts = {
        release: Counter(op for rows in held.values() for op in {op for op, _ in routed(rows)})
        for release, held in found.items()
    }
    ops = sorted(
        {op for held in counts.values() for op in held}, key=lambda op: (-counts[[*found][-1]][op], op)
    )
    yield f"| Families with | {' | '.join(found)} |"
    yield f"|---|{'---:|' * len(found)}"
    yield f"| any candidate | {' | '.join(str(len(held)) for held in found.values())} |"
    for op in ops:
        yield f"| `{op}` | {' | '.join(str(held[op]) for held in counts.values())} |"


def shown(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, list[str]]]:
    """Return what is routed and what is not of each family in the table, without releases."""
    return {
        row["family"]: {
            "routed": [re.sub(r" \(\d+\.\d+\.\d+\)", "", line) for line in row["routed"]],
            "not routed": row["not routed"],
        }
        for row in rows
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the table and the numbers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--wheels", type=Path, default=WHEELS, help="where wheels are kept (default: %(default)s)"
    )
    chosen = parser.parse_args(arguments)
    found: dict[str, Families] = {}
    for release in RELEASES:
        print(f"transformers {release}", file=sys.stderr, flush=True)
        rows = judged(wheel(release, chosen.wheels))
        found[release] = by_family(supplied(rows))
    tables.write("models", table(found))
    page = tables.placed(DOCUMENT.read_text(encoding="utf-8"), BEGIN, summary(found))
    DOCUMENT.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
