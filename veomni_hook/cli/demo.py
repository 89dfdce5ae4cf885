"""`veomni-hook demo`: one unchanged training script, run without and with the hook, and held side by side.

Everything that is measured runs in a process of its own; this one only starts them, compares and prints. The
comparison has a verdict: curves that differ, or a hook that patched nothing, are exit status 1.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from veomni_hook.cli import output
from veomni_hook.cli.usage import FOUND, UsageError

MODULE = "transformers.models.qwen3.modeling_qwen3"
EXTRA = ("accelerate", "matplotlib")
# Relative, at every step. Kernels that fuse or reorder float32 sums differ in the last bits of a gradient,
# and Adam's first steps are the sign of the gradient, which magnifies that. Measured on a CPU: some 1e-7.
TOLERANCE = 1e-4
FOLDER = Path("demo_output")
MEBIBYTE = 2**20


def demo(
    steps: Annotated[int, typer.Option(min=2, help="Optimizer steps of each training.")] = 20,
    seed: Annotated[int, typer.Option(help="Seed of the weights and the text.")] = 0,
    folder: Annotated[
        Path, typer.Option("--output", help="Folder for the plot, the report and the patched sources.")
    ] = FOLDER,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,  # noqa: FBT002
) -> None:
    """Train a small Qwen3 with transformers' Trainer, once without and once with the hook, and compare."""
    missing = [name for name in EXTRA if find_spec(name) is None]
    if missing:
        raise UsageError(
            f"the demo needs {' and '.join(missing)}",
            where="this Python environment",
            fix="pip install 'veomni-hook[demo]'",
        )
    script = training_script()
    _check_folder(folder if folder == FOLDER else folder.resolve())
    report = measure(script, folder, ["--steps", str(steps), "--seed", str(seed)], steps)
    (folder / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    from veomni_hook.cli.plot import write_plot

    write_plot(report, folder / "demo.png")
    if as_json:
        output.emit_json(report)
    else:
        show(report, script, folder)
    if not (report["equal"] and report["patched_sources"]):
        raise typer.Exit(FOUND)


def training_script() -> Path:
    """Return the training script: beside the package in a checkout, inside it in an installed wheel.

    Raises:
        UsageError: neither is there.
    """
    package = Path(__file__).resolve().parents[1]
    for folder in (package, package.parent):
        script = folder / "examples" / "train.py"
        if script.is_file():
            return script
    raise UsageError(
        "examples/train.py is missing",
        where=str(package),
        fix="install veomni-hook again; its wheel carries the script",
    )


def _check_folder(folder: Path) -> None:
    """Make the folder where missing; see that no other user could send what is written elsewhere."""
    from veomni_hook.cache.trust import Defect
    from veomni_hook.finders.dump import open_folder

    try:
        open_folder(str(folder)).close()
    except (OSError, Defect) as error:
        raise UsageError(
            f"nothing can be written there: {error}",
            where=str(folder),
            fix="name a folder of your own: veomni-hook demo --output FOLDER",
        ) from error


def measure(script: Path, folder: Path, arguments: list[str], steps: int) -> dict[str, Any]:
    """Train without and with the hook, probe imports and the loss step, and return the whole report.

    Args:
        script: the training script, run as it is.
        folder: where the patched sources of the hooked run are written, below `patched/`.
        arguments: options of the script, but for `--output`.
        steps: how many steps the script was asked for.

    Raises:
        typer.Exit: one of the processes failed; its output has been shown.
    """
    patched = folder.resolve() / "patched"
    known = set(patched.rglob("*.py"))
    for file in known:
        file.unlink()
    # An outer `veomni-hook run` reaches its children by these variables; the plain run must not see them.
    plain = {**os.environ, "HF_HUB_OFFLINE": "1", "VEOMNI_HOOK": "0"}
    hooked = {**plain, "VEOMNI_HOOK": "1", "VEOMNI_DUMP_PATCHED": "1", "VEOMNI_DUMP_DIR": str(patched)}
    run = [sys.executable, "-m", "veomni_hook", "run"]
    with probe({**plain, "VEOMNI_HOOK": "1"}) as measured:
        report: dict[str, Any] = {
            "module": MODULE,
            "transformers": version("transformers"),
            "plain": train([sys.executable, str(script), *arguments], plain, steps, "without the hook"),
            "hooked": train([*run, str(script), *arguments], hooked, steps, "with the hook"),
            "tolerance": TOLERANCE,
            **measured(),
            "patches": patches_of(MODULE),
            "patched_sources": sorted(str(file) for file in patched.rglob("*.py")),
        }
    report["device"] = report["eager"]["device"]
    report["differences"] = differences(report["plain"]["losses"], report["hooked"]["losses"])
    report["equal"] = max(report["differences"]) <= TOLERANCE
    return report


def differences(plain: list[float], hooked: list[float]) -> list[float]:
    """Return the relative difference of two loss curves at each step; infinite where one curve has ended."""
    shared = [abs(b - a) / abs(a) for a, b in zip(plain, hooked, strict=False)]
    # Every comparison with nan is false; as infinity it counts as a difference.
    ended = [math.inf] * abs(len(plain) - len(hooked))
    return [math.inf if math.isnan(value) else value for value in shared] + ended


def train(command: list[str], environment: dict[str, str], steps: int, label: str) -> dict[str, Any]:
    """Run the training script in its own process, with a progress bar, and return what it recorded."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    terminal = output.console(stderr=True)
    said: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        with (
            subprocess.Popen(
                [*command, "--output", str(result)],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                encoding="utf-8",
                errors="replace",
            ) as process,
            Progress(*columns, console=terminal, disable=not terminal.is_terminal) as progress,
        ):
            task = progress.add_task(f"training {label}", total=steps)
            for line in process.stdout or ():
                said.append(line)
                progress.advance(task, int(line.startswith("step ")))
        if process.returncode or not result.is_file():
            _give_up(f"the training {label} failed (exit status {process.returncode})", "".join(said))
        if not terminal.is_terminal:
            output.note(f"trained {steps} steps {label}")
        recorded: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return recorded


@contextmanager
def probe(environment: dict[str, str]) -> Iterator[Callable[[], dict[str, Any]]]:
    """Start a process that will measure import times and the loss step; it does so when the value is called.

    Its imports (seconds, on one core) run beside those of the first training, before the steps that count.
    """
    with tempfile.TemporaryDirectory() as cache:
        process = subprocess.Popen(
            [sys.executable, "-m", "veomni_hook.cli.probe", cache],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        )

        def measured() -> dict[str, Any]:
            with output.console(stderr=True).status("measuring imports and one loss step"):
                out, said = process.communicate("go\n")
            if process.returncode:
                _give_up(f"the measurement failed (exit status {process.returncode})", said)
            found: dict[str, Any] = json.loads(out.splitlines()[-1])
            return found

        with process:
            try:
                yield measured
            finally:
                process.kill()


def patches_of(module: str) -> dict[str, Any]:
    """Return a module's report and the cached file that imports execute; no torch is imported for it."""
    from veomni_hook.finders.prepare import prepare
    from veomni_hook.settings import resolve

    prepared = prepare(module, resolve().settings)
    applied = prepared.report.to_dict()["applied"] if prepared.report is not None else []
    return {"applied": applied, "stored": prepared.stored_path, "reason": prepared.reason}


def show(report: dict[str, Any], script: Path, folder: Path) -> None:
    """Print the report for a reader."""
    output.emit_heading(f"What was patched in {report['module']} (transformers {report['transformers']})")
    applied = report["patches"]["applied"]
    output.emit_table(
        ("kind", "target", "lines", "reason"),
        [(p["kind"], p["target"], "-".join(map(str, p["lines"])), p["reason"]) for p in applied],
    )
    output.emit_fields(
        {
            "executed source": report["patches"]["stored"] or report["patches"]["reason"],
            "as the training had it": report["patched_sources"] or "nothing was patched",
            "training script": f"{script} (unchanged, the same file both times)",
        }
    )
    output.emit_heading(f"Loss, {report['plain']['parameters']:,} parameters, {report['device']}")
    plain, hooked = report["plain"]["losses"], report["hooked"]["losses"]
    curves = zip(plain, hooked, report["differences"], strict=False)
    output.emit_table(
        ("step", "without", "with", "relative difference"),
        [(step, f"{a:.5f}", f"{b:.5f}", f"{d:.1e}") for step, (a, b, d) in enumerate(curves, start=1)],
    )
    verdict = "equal" if report["equal"] else "NOT EQUAL"
    largest = f"largest relative difference {max(report['differences']):.1e}, tolerance {TOLERANCE:.0e}"
    output.emit_fields({"loss curves": f"{verdict} ({largest})"})
    output.emit_heading("Cost and gain")
    output.emit_fields(costs(report))
    output.emit_heading("Kernels in the chunked loss step")
    output.emit("".join(f"  {line}\n" for line in report["chunked"]["kernels"]))
    output.emit_heading("Files")
    output.emit_fields({"plot": folder / "demo.png", "report": folder / "report.json"})


def costs(report: dict[str, Any]) -> dict[str, str]:
    """Return step time, import overhead and peak memory as lines of text."""
    plain, hooked = (median_step(report[name]["step_seconds"]) * 1e3 for name in ("plain", "hooked"))
    unpatched, cold, warm = (report["import_seconds"][name] * 1e3 for name in ("unpatched", "cold", "warm"))
    eager, chunked = (report[name]["peak_bytes"] / MEBIBYTE for name in ("eager", "chunked"))
    return {
        "step time": f"{plain:.1f} ms without, {hooked:.1f} ms with the hook ({hooked / plain:.2f}x)",
        "import": (
            f"{unpatched:.1f} ms unpatched; patched {cold - unpatched:+.1f} ms cold "
            f"(first patched module of the process), {warm - unpatched:+.1f} ms warm"
        ),
        f"loss step, vocabulary {report['vocabulary']:,}, {report['tokens']} tokens": (
            f"peak {eager:.0f} MiB eager, {chunked:.0f} MiB chunked ({chunked / eager:.2f}x); "
            f"loss {report['eager']['loss']:.5f} and {report['chunked']['loss']:.5f}"
        ),
    }


def median_step(seconds: list[float]) -> float:
    """Return the median step time without the first steps, which allocate and warm up."""
    return statistics.median(seconds[min(3, len(seconds) - 1) :])


def _give_up(message: str, said: str) -> None:
    sys.stderr.write(said)
    output.note(f"error: {message}")
    raise typer.Exit(FOUND)
