"""``python -m tests.rehearsal``: releases that do not exist yet, by mechanical rewrites of one. ``make rehearse``."""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from tests.rehearsal.kinds import KINDS
from tests.rehearsal.release import Release
from tests.rehearsal.run import COLUMNS, FAILURES, Rehearsal

_WIDTHS = (30, *[max(7, len(each)) for each in COLUMNS], 8)


def main(
    seed: Annotated[
        int | None, typer.Option(help="of everything random; drawn and printed by default")
    ] = None,
    kinds: Annotated[str, typer.Option(help="kinds of rewrites, with commas; all by default")] = "",
    modules: Annotated[
        str, typer.Option(help="families, with commas, or how many modules, drawn by the seed")
    ] = "",
    jobs: Annotated[int, typer.Option(help="processes")] = 2,
    prove: Annotated[
        int, typer.Option(help="modules, drawn by the seed, whose routed sites are proven")
    ] = 30,
    transformers: Annotated[
        Path | None, typer.Option(help="the folder that holds another release's package")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="write what became of each site as JSON")] = None,
) -> None:
    """Rewrite the release in each way, and say what became of the routed sites; exit with 1 if any is wrong."""
    chosen = [each.strip() for each in kinds.split(",") if each.strip()] or list(KINDS)
    if unknown := [each for each in chosen if each not in KINDS]:
        raise typer.BadParameter(f"{', '.join(unknown)}: there are {', '.join(KINDS)}")
    seed = random.SystemRandom().randrange(10**6) if seed is None else seed
    release = Release.at(transformers)
    names = release.modeling
    if modules.isdecimal():
        names = sorted(random.Random(seed).sample(names, min(int(modules), len(names))))
    elif families := {each.strip() for each in modules.split(",") if each.strip()}:
        names = [each for each in names if families & {*each.split(".")}]
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rehearsal") as folder:
        rehearsal = Rehearsal(release, names, seed, jobs, prove, Path(folder))
        renamed = ", ".join(f"{old} to {new}" for old, new in rehearsal.facts.names.items())
        print(
            f"{release.folder}: {len(names)} modules, seed {seed}; parameters renamed: {renamed}", flush=True
        )
        print(
            f"proven: {rehearsal.proven_by_itself()} sites of {len(rehearsal.sample)} modules drawn by the seed"
        )
        _print("kind", *COLUMNS, "seconds")
        results = []
        for kind in chosen:
            start = time.monotonic()
            result = rehearsal.of(kind)
            results.append(result)
            _print(kind, *(result.counts[each] for each in COLUMNS), round(time.monotonic() - start))
            for line in result.failures:
                print(f"  {line}", flush=True)
    total = sum((result.counts for result in results), Counter[str]())
    _print("all", *(total[each] for each in COLUMNS), round(time.monotonic() - began))
    if output is not None:
        output.write_text(json.dumps([each.to_dict() for each in results], indent=1) + "\n", encoding="utf-8")
    sys.exit(any(total[each] for each in FAILURES) or not total)


def _print(*cells: object) -> None:
    row = [
        f"{cells[0]:<{_WIDTHS[0]}}",
        *(f"{each!s:>{w}}" for each, w in zip(cells[1:], _WIDTHS[1:], strict=True)),
    ]
    print("  ".join(row), flush=True)


if __name__ == "__main__":
    typer.run(main)
