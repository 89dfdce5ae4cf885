"""`veomni-hook bench`: compare every op with its alternatives here, and with the device's limit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from veomni_hook import accelerator
from veomni_hook.tools.cli import output
from veomni_hook.tools.cli.inputs.options import JsonOption
from veomni_hook.tools.facts import Facts

if TYPE_CHECKING:
    from veomni_hook.tools.bench.run import Row


def bench(  # noqa: PLR0913 - the options of the command
    ops: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="OP",
            help="Measure these ops. Default: all.",
            autocompletion=complete_op,
            show_default=False,
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="TYPE",
            help="A torch device type (cpu, cuda, npu). Default: the best one on this machine.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the results to this JSON file, after every measurement.",
            show_default=False,
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Draw the results into this PNG file. Needs the extra `demo`.",
            show_default=False,
        ),
    ] = None,
    *,
    quick: Annotated[bool, typer.Option("--quick", help="Measure only two sizes of each op.")] = False,
    size: Annotated[
        str,
        typer.Option(metavar="TEXT", help="Measure only sizes whose line has this text.", show_default=False),
    ] = "",
    side: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Measure only this implementation, such as ours. May be repeated.",
            show_default=False,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure kernels, and for comparison the upstream code, torch.compile, and Liger and QuACK if installed.

    Each entry is one part of an op (for example its backward) at one size. For each implementation it has the
    median time, the share of the device's limit (the bandwidth of a copy, or, by turns with what is measured,
    the rate of a large matrix product, for the loss its own three products), the peak memory, and whether it
    is faster than the upstream code, slower, the same, or too noisy to tell. Time on the host has separate
    entries. If a run is interrupted, the file of --out holds what was measured, and names
    the ops that were not finished.
    """
    from veomni_hook.tools.bench.cases import benchmarks, checked, problems

    names = checked(ops or [*benchmarks()])
    import torch

    from veomni_hook.tools.bench import record
    from veomni_hook.tools.bench.run import measured

    place = device or accelerator.best()
    torch.manual_seed(0)
    rows: list[Row] = []

    def recorded(unfinished: Sequence[str]) -> Facts:
        facts = record.described(", ".join(names), place, rows, unfinished)
        if out is not None:
            record.write(facts, out)
        return facts

    for number, name in enumerate(names):
        chosen = (problem for problem in problems(name, place, quick=quick) if size in problem.shape)
        if side:
            chosen = (problem.only(side) for problem in chosen)
        for row in measured(chosen, place):
            output.note(_said(row))
            rows.append(row)
            recorded(names[number:])
    facts = recorded([])
    if as_json:
        output.emit_json(facts)
    else:
        show(rows, facts)
    if out is not None:
        output.note(f"written: {out}")
    if plot is not None:
        record.write_plot(rows, f"{facts['device']}, torch {facts['torch']}", plot)
        output.note(f"written: {plot}")


def complete_op(incomplete: str) -> list[str]:
    """Complete the name of an op for the shell."""
    from veomni_hook.tools.bench.cases import benchmarks

    return [op for op in benchmarks() if op.startswith(incomplete)]


def _said(row: Row) -> str:
    if row.failed:
        return "; ".join(
            f"{row.op} {row.shape}: {side} {row.part}: {why}" for side, why in row.failed.items()
        )
    taken = ", ".join(f"{side} {milliseconds:.3f} ms" for side, milliseconds in row.milliseconds.items())
    return f"{row.op} {row.part} {row.shape}: {taken}"


def show(rows: Sequence[Row], facts: Facts) -> None:
    """Print the table of measurements, and what could not be measured."""
    from veomni_hook.tools.bench import record

    output.emit_heading(f"{facts['device']}, torch {facts['torch']}; share of the limit in %")
    sides = list(dict.fromkeys(side for row in rows for side in row.milliseconds))
    output.emit_table(
        [*record.COLUMNS, *sides], [record.cells(row, sides) for row in rows if row.milliseconds]
    )
    for row in rows:
        if row.failed:
            output.emit_text(f"{_said(row)}\n")
