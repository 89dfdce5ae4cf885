"""`veomni-hook compare`: run the user's training script alternately without and with the hook."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from veomni_hook.tools.cli import output
from veomni_hook.tools.cli.inputs.options import JsonOption, ModuleOption, ScriptArgument, VerboseOption
from veomni_hook.tools.cli.run.forwarding import ForwardingCommand
from veomni_hook.tools.cli.run.program import command_of
from veomni_hook.tools.cli.usage import FOUND, UsageError, write_file
from veomni_hook.tools.facts import Facts

if TYPE_CHECKING:
    from veomni_hook.tools.compare.report import Report
    from veomni_hook.tools.compare.runs import Run

INTERRUPTED = 130
MEBIBYTE = 2**20
ROWS = 10


def compare(  # noqa: PLR0913, PLR0917 - one for each option
    command: ScriptArgument = None,
    module: ModuleOption = None,
    steps: Annotated[int, typer.Option(min=2, help="Optimizer steps of each run; then it is stopped.")] = 20,
    rounds: Annotated[int, typer.Option(min=1, help="Runs without the hook, and as many with it.")] = 2,
    warmup: Annotated[
        int, typer.Option(min=1, help="First steps that do not count in step time and tokens.")
    ] = 3,
    page: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", metavar="FILE", help="Also write an HTML page, with curves.", show_default=False
        ),
    ] = None,
    cwd: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Run in this folder; created if missing.", show_default=False),
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(min=1, metavar="SECONDS", help="Stop a run that takes longer.", show_default=False),
    ] = None,
    *,
    verbose: VerboseOption = False,
    as_json: JsonOption = False,
) -> None:
    """Run your training script alternately without and with the hook, and compare.

    Each run is a new process and ends after --steps optimizer steps, and one more that is profiled. The
    result shows step times, tokens per second, memory, the kernels that ran, the losses (how much they differ
    with and without the hook, and how much two runs without it differ: the script's own noise), and why a
    step is not faster. The script does everything that it normally
    does and also writes its files: `{run}` in an argument becomes the name of the run, as in
    `--output_dir /tmp/out-{run}`.

    Exits with 1 if a run fails, if no steps are seen, or if losses differ by more than rounding and the
    script's own noise.
    """
    from veomni_hook.settings import resolve
    from veomni_hook.tools.compare.report import report_of
    from veomni_hook.tools.compare.turns import Order, take_turns

    words = command or []
    started = _command(words, module)
    if page is not None and not page.absolute().parent.is_dir():
        raise UsageError(
            "the page cannot be written: there is no such folder",
            where=str(page.absolute().parent),
            fix="create the folder, or name another file with -o",
        )
    if cwd is not None:
        _make(cwd)
        # A script's path is made absolute; other arguments are relative to the folder of the run.
        started = [
            os.path.abspath(word) if word.endswith(".py") and os.path.isfile(word) else word
            for word in started
        ]
    order = Order(started, resolve().settings, steps, rounds, cwd, timeout, verbose)
    runs: list[Run] = []
    try:
        with _shown(2 * rounds, steps) as told:
            for run in take_turns(order, told):
                runs.append(run)
                output.note(_said(run))
    except KeyboardInterrupt:
        output.note("interrupted: the script and all processes that it started were stopped")
        raise typer.Exit(INTERRUPTED) from None
    except OSError as error:
        raise UsageError(
            f"the command cannot be run: {error}", where=started[0], fix="check the command"
        ) from error
    report = report_of(runs, ["-m", module, *words] if module else words, steps, warmup)
    if as_json:
        output.emit_json(report)
    else:
        _show(report)
    if page is not None:
        from veomni_hook.tools.compare.page import page_of

        write_file(page, page_of(report, rows_of(report)), "the page", "name another file with -o")
        output.note(f"written: {page}")
    if not report["ok"]:
        raise typer.Exit(FOUND)


compare.command_class = ForwardingCommand  # type: ignore[attr-defined]


def _command(words: Sequence[str], module: str | None) -> list[str]:
    """Return the command for a script, a module, `python ...` or a program such as torchrun.

    Raises:
        UsageError: there is nothing to run, or no such script or program.
    """
    if module is None and not words:
        raise UsageError(
            "no script and no module",
            where="veomni-hook compare",
            fix="name one: compare train.py, compare torchrun --nproc_per_node 2 train.py, compare -m module",
        )
    return command_of(words, module)


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"the folder cannot be created: {error.strerror}",
            where=str(folder),
            fix="name another with --cwd",
        ) from error


@contextmanager
def _shown(count: int, steps: int) -> Iterator[Callable[[Run, int], None]]:
    """Show the current run and its progress on a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    terminal = output.console(stderr=True)
    with Progress(*columns, console=terminal, disable=not terminal.is_terminal, transient=True) as progress:
        task = progress.add_task("starting", total=steps)

        def told(run: Run, done: int) -> None:
            number = 2 * run.turn - (0 if run.hooked else 1)
            progress.update(task, description=f"{number} of {count}: {run.label}", completed=done)

        yield told


def _said(run: Run) -> str:
    from statistics import median

    from veomni_hook.tools.compare.verdict import readable_time

    if run.failed:
        return f"{run.label}: failed (exit status {run.status})"
    seconds = run.seconds
    taken = f", median {readable_time(median(seconds))}" if seconds else ""
    return f"{run.label}: {len(run.times)} step{'' if len(run.times) == 1 else 's'}{taken}"


def _show(report: Report) -> None:
    for run in report["runs"]:
        if run["label"] in report["failed"]:
            output.emit_heading(f"{run['label']}: exit status {run['status']}, the last lines")
            output.emit("".join(f"  {line}\n" for line in run["last_lines"] or ["(it printed nothing)"]))
            output.emit("\n")
    if report["without"]["runs"] or report["with"]["runs"]:
        world = report["world"] or 1
        ranks = f", {world} ranks (rank 0's figures; tokens of all)" if world > 1 else ""
        name, device = ", ".join(report["models"]) or "the script", report["device"] or "an unknown device"
        output.emit_heading(f"{name} on {device}, {report['optimizer']}{ranks}")
        output.emit_table(("", "without", "with the hook", "with / without"), rows_of(report))
        output.emit("\n")
        _show_losses(report)
        _show_kernels(report["kernels"])
    if report["notes"]:
        output.emit_heading("Notes")
        output.emit("".join(f"  - {note}\n" for note in report["notes"]))
        output.emit("\n")
    output.emit(f"{report['statement']}\n")
    if report["why"]:
        output.emit(f"Why: {' '.join(report['why'])}\n")


def rows_of(report: Report) -> list[tuple[str, str, str, str]]:
    """Return the rows of figures: name, without, with, and ratio; `-` for unknown values."""
    from veomni_hook.tools.compare.verdict import percent, readable_time

    sides = report["without"], report["with"]
    memory = "peak memory, device" if sides[0]["memory"] == "device" else "peak memory, resident"

    def row(
        name: str, key: str, said: Callable[[Any], str], *, ratio: bool = True
    ) -> tuple[str, str, str, str]:
        plain, hooked = (one[key] for one in sides)
        known = plain and hooked and ratio
        values = ("-" if value is None else said(value) for value in (plain, hooked))
        return (name, *values, f"{hooked / plain:.2f}" if known else "")  # type: ignore[return-value]

    noise = report["time"]["noise"]
    between = "" if noise is None else f"runs differ by {percent(noise)}"
    median = row("median step", "median", readable_time)
    ratio = report["time"]["ratio"]
    spread = row(
        "  middle half", "quartiles", lambda pair: " to ".join(map(readable_time, pair)), ratio=False
    )
    return [
        (*median[:3], "" if ratio is None else f"{ratio:.2f}"),
        (*spread[:3], between),
        row("tokens per second", "tokens_a_second", lambda value: f"{value:,.0f}"),
        row(memory, "peak", lambda value: f"{value / MEBIBYTE:,.0f} MiB"),
        row("first step", "first_step", readable_time),
        row("start to first step", "time_to_first", readable_time),
    ]


def _show_losses(report: Report) -> None:
    plain, hooked = report["curves"]["without"], report["curves"]["with"]
    between, own = (report["loss"][name]["by_step"] for name in ("without_and_with", "two_without"))
    if not between:
        return
    count = len(between)
    chosen = sorted({round(index * (count - 1) / max(ROWS - 1, 1)) for index in range(ROWS)})
    losses = [[None if value is None else f"{value:.5f}" for value in curve] for curve in (plain, hooked)]
    losses += [["not a number" if v is None else f"{v:.1e}" for v in values] for values in (between, own)]
    rows = [(step + 1, *(one[step] if step < len(one) else None for one in losses)) for step in chosen]
    output.emit_heading("Loss (largest relative differences between runs)")
    output.emit_table(("step", "without", "with", "without and with", "two without"), rows)
    output.emit("\n")


def _show_kernels(kernels: Sequence[Facts]) -> None:
    from veomni_hook.tools.compare.kernels import named

    if not kernels:
        return
    output.emit_heading("What ran with the hook (eager: upstream's code)")
    output.emit_table(
        ("op", "backend", "places", "calls", "reason"),
        [
            (
                f"{row['op']}/{row['variant']}",
                named(row),
                row["places"],
                f"{row['calls']:,}",
                row["reason"],
            )
            for row in kernels
        ],
    )
    output.emit("\n")
