"""``python -m tests.stress [PART ...]``: what the project promises, tried very often. ``make stress``."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from tests.stress import document, stand
from tests.stress.result import COLUMNS, Part, table

PARTS = ("starts", "kills", "tampering", "dependencies", "generated")


def in_worker(name: str, folder: Path, count: int, seed: int, *more: str) -> Part:
    """Run a part about the cache in an interpreter of its own; `worker` says what else may be given."""
    (folder / "tmp").mkdir(parents=True)
    command = [sys.executable, "-m", "tests.stress.worker", name, str(folder), str(count), str(seed), *more]
    environment = stand.environment(folder) | {"TMPDIR": str(folder / "tmp")}
    done = subprocess.run(
        command, cwd=stand.ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{name} ended with status {done.returncode}")
    return Part.from_json(done.stdout.splitlines()[-1])


def main(
    parts: Annotated[list[str] | None, typer.Argument(help=f"of {', '.join(PARTS)}; all by default")] = None,
    seed: Annotated[
        int | None, typer.Option(help="of everything random; drawn and printed by default")
    ] = None,
    starts: Annotated[int, typer.Option(help="starts of a small package at once")] = 256,
    real: Annotated[int, typer.Option(help="starts of the installed transformers at once")] = 8,
    kills: Annotated[int, typer.Option(help="starts that are killed")] = 1000,
    flips: Annotated[int, typer.Option(help="a sample of tamperings, with so many flipped bits; 0: all")] = 0,
    changes: Annotated[int, typer.Option(help="changes of what configs depend on")] = 2000,
    modules: Annotated[int, typer.Option(help="generated modules")] = 100_000,
    workers: Annotated[int, typer.Option(help="processes for generated modules")] = 2,
    output: Annotated[Path | None, typer.Option(help="write the result as JSON")] = None,
    write: Annotated[
        bool, typer.Option("--document", help="write docs/data/stress.json and the sums of the page")
    ] = False,
) -> None:
    """Try it all, print a table, and exit with 1 if anything was lost, wrong or failed."""
    if unknown := [one for one in parts or () if one not in PARTS]:
        raise typer.BadParameter(f"{', '.join(unknown)}: there are {', '.join(PARTS)}")
    seed = random.SystemRandom().randrange(10**6) if seed is None else seed
    print(f"seed {seed}", flush=True)
    from tests.stress.generated import generated
    from tests.stress.starts import starts as start

    with tempfile.TemporaryDirectory(prefix="stress") as made:
        folder = Path(made)
        run: dict[str, Callable[[], Part]] = {
            "starts": lambda: start(folder / "starts", starts, real, seed),
            "kills": lambda: in_worker("kills", folder / "kills", kills, seed),
            "tampering": lambda: in_worker("tampering", folder / "tampering", flips, seed),
            "dependencies": lambda: in_worker("dependencies", folder / "dependencies", changes, seed),
            "generated": lambda: generated(modules, seed, workers),
        }
        found = []
        for name in parts or PARTS:
            began = time.monotonic()
            found.append(run[name]())
            print(f"{name}: {found[-1].total().count:,} in {time.monotonic() - began:.0f} s", flush=True)
    _report(found)
    if output is not None:
        output.write_text(json.dumps([asdict(part) for part in found], indent=1) + "\n", encoding="utf-8")
    if write:
        document.write(found)
    sys.exit(not all(part.ok for part in found))


def _report(found: list[Part]) -> None:
    shown = Table(*COLUMNS)
    for row in table(found):
        shown.add_row(*row)
    Console(width=190).print(shown)
    for part in found:
        for failure in part.failures:
            print(f"FAILED ({part.name}, seed {part.seed}): {failure}")
    total = sum(part.total().count for part in found)
    bad = sum(line.bad for part in found for line in part.lines)
    print(f"{total:,} tried in {sum(part.seconds for part in found):.0f} s, {bad} failures")


if __name__ == "__main__":
    typer.run(main)
