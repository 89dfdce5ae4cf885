"""``python -m tests.proof [FAMILY ...]``: every routed site against the upstream body. ``make proof``."""

from __future__ import annotations

import json
import re
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from tests.proof.runner import OUTCOMES, Verdict, modules, prove

_LINE = re.compile(r" \(line \d+\)")


def main(
    families: Annotated[list[str] | None, typer.Argument(help="families; all by default")] = None,
    op: Annotated[list[str] | None, typer.Option(help="only these ops")] = None,
    workers: Annotated[int, typer.Option(help="processes")] = 2,
    kernels: Annotated[
        str, typer.Option(help="what the guards run; triton in its interpreter")
    ] = "reference",
    derivatives: Annotated[
        bool, typer.Option(help="compare every kind of derivative, of operands that depend on each other")
    ] = False,
    device: Annotated[str, typer.Option(help="where calls run")] = "cpu",
    share: Annotated[str, typer.Option(help="every N-th module from the K-th, as K/N")] = "1/1",
    output: Annotated[Path | None, typer.Option(help="write the verdicts as JSON")] = None,
) -> None:
    """Build every routed site, run it through its guard and through upstream's body, and compare.

    A line says when each module is done, others at once what has no proof.
    """
    first, _, step = share.partition("/")
    names = modules(families or ())[int(first) - 1 :: int(step)]
    verdicts: list[Verdict] = []
    began = time.monotonic()
    for name, of_module in prove(names, op or (), workers, kernels, derived=derivatives, device=device):
        verdicts += of_module
        print(f"{time.monotonic() - began:4.0f} s  {name}: {len(of_module)} sites", flush=True)
        for verdict in of_module:
            if verdict.failed:
                print(verdict, flush=True)
    verdicts.sort(key=lambda verdict: (verdict.module, verdict.target, verdict.op))
    table = Table("op", "variant", "sites", *OUTCOMES, "with gradients")
    counts = Counter((v.op, v.variant, v.outcome) for v in verdicts)
    compared = Counter((v.op, v.variant) for v in verdicts if v.gradients)
    for key in sorted({(v.op, v.variant) for v in verdicts}):
        row = [counts[*key, outcome] for outcome in OUTCOMES]
        table.add_row(*key, *map(str, (sum(row), *row, compared[key])))
    Console(width=160).print(table)
    failures = [verdict for verdict in verdicts if verdict.failed]
    for op in sorted({verdict.op for verdict in verdicts if verdict.operands or verdict.unproven}):
        of_op = [verdict for verdict in verdicts if verdict.op == op]
        proven, unproven = sum(v.operands for v in of_op), [text for v in of_op for text in v.unproven]
        print(f"{op}: {proven} operands of inserted calls proven, {len(unproven)} unproven")
        for reason, count in Counter(_LINE.sub("", text) for text in unproven).most_common():
            print(f"  {count} x {reason}")
    by_text = sum(not verdict.gradients for verdict in verdicts) - len(failures)
    print(f"gradients compared at {compared.total()} sites, {by_text} bound calls compared by text")
    print(f"{len(names)} modules in {time.monotonic() - began:.0f} s")
    print(f"{len(verdicts)} routed sites, {len(failures)} without proof")
    if output is not None:
        output.write_text(json.dumps([v.to_dict() for v in verdicts], indent=1) + "\n", encoding="utf-8")
    sys.exit(bool(failures) or not verdicts)


if __name__ == "__main__":
    typer.run(main)
