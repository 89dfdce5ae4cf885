"""``python -m tests.proof.mutate``: change recognised bodies at random; what is still routed must still be equal.

For every form that the idioms recognise, one site stands for all; each mutant is patched, run and compared as
`tests.proof` does with upstream's own code. A mutant that stays routed and whose guard computes something else
than its body is a false positive. `tests.proof.judge` says what else may become of it.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from tests.proof.judge import FAILURES, OUTCOMES, Form, Judged, forms, judge
from tests.proof.runner import in_processes, modules


def run(chosen: list[Form], count: int, seed: int, workers: int) -> Iterator[list[Judged]]:
    """Judge mutants of forms in parallel; yields what became of those of each form."""
    for form, result in in_processes(judge, {form: (form, count, seed) for form in chosen}, workers):
        if isinstance(
            result, BaseException
        ):  # a form that cannot be judged is a failure, and no end of the run
            detail = f"{type(result).__name__}: {result}"
            result = [Judged(form.op, *form.sites[0], "unproved", "the form", detail)]
        yield result


def main(
    families: Annotated[list[str] | None, typer.Argument(help="families; all by default")] = None,
    op: Annotated[list[str] | None, typer.Option(help="only these ops")] = None,
    count: Annotated[int, typer.Option(help="mutants of a form")] = 20,
    seed: Annotated[int, typer.Option(help="of the random changes")] = 0,
    workers: Annotated[int, typer.Option(help="processes")] = 2,
    show: Annotated[list[str] | None, typer.Option(help="list mutants of these outcomes, too")] = None,
    output: Annotated[Path | None, typer.Option(help="write what became of each mutant as JSON")] = None,
) -> None:
    """Change recognised bodies at random; exits 1 if a guard computes something else than its mutated body."""
    began = time.perf_counter()
    chosen = forms(modules(families or ()), op or ())
    judged: list[Judged] = []
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("mutating", total=len(chosen))
        for found in run(chosen, count, seed, workers):
            judged += found
            progress.update(task, advance=1)
    judged.sort(key=lambda one: (one.op, one.module, one.target))
    Console(width=150).print(_table(judged))
    for one in judged:
        if one.outcome in FAILURES or one.outcome in (show or ()):
            print(f"{one.outcome}: {one.module} {one.target} ({one.op}): {one.label}: {one.detail}")
    if output is not None:
        output.write_text(json.dumps([asdict(one) for one in judged], indent=1) + "\n", encoding="utf-8")
    failures = sum(one.outcome in FAILURES for one in judged)
    seconds = time.perf_counter() - began
    print(
        f"{len(judged)} mutants of {len(chosen)} forms in {seconds:.0f} s, {failures} failures (seed {seed})"
    )
    sys.exit(bool(failures) or not judged)


def _table(judged: list[Judged]) -> Table:
    counts = Counter((one.op, one.outcome) for one in judged)
    shown = [outcome for outcome in OUTCOMES if any(one.outcome == outcome for one in judged)]
    table = Table("op", "mutants", *shown)
    for op in sorted({one.op for one in judged}):
        row = [counts[op, outcome] for outcome in shown]
        table.add_row(op, str(sum(row)), *map(str, row))
    total = [sum(one.outcome == outcome for one in judged) for outcome in shown]
    table.add_row("all", str(sum(total)), *map(str, total))
    return table


if __name__ == "__main__":
    typer.run(main)
