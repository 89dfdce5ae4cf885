"""The report of the demo as text."""

from __future__ import annotations

from pathlib import Path
from statistics import median

from veomni_hook.tools.cli import output
from veomni_hook.tools.cli.demo.models import RANDOM
from veomni_hook.tools.cli.demo.shapes import Part, Report
from veomni_hook.tools.compare.verdict import readable_time
from veomni_hook.tools.facts import Facts
from veomni_hook.tools.significance import FEW, NOISY, SAME

SHOWN_STEPS = 8
MEBIBYTE = 2**20


def show(report: Report, script: Path) -> None:
    """Print the report for a reader; `script` is the training script."""
    parts = {part["title"]: part for part in report["parts"].values()}
    first = next(iter(parts.values()))["plain"]
    machine = f"transformers {report['transformers']}, torch {report['torch']}, {report['device_name']}"
    if report["device"] == "cpu":
        machine += f" ({report['threads']} threads)"
    output.emit(f"veomni-hook demo: {machine}\n\n")
    shown = script.relative_to(Path.cwd()) if script.is_relative_to(Path.cwd()) else script
    weights = "random weights" if report["model"] == RANDOM else "trained weights"
    output.emit_text(
        f"{shown} fine-tunes {report['model']} ({first['parameters']:,} {weights}) on Python's "
        f"documentation, {first['tokens']:,} tokens a step: the same file without and with the hook, step by "
        "step in turns."
    )
    output.emit_heading("\nWhat is the capital of France? (before training)")
    answers = (first["answer"], next(iter(parts.values()))["hooked"]["answer"])
    output.emit_fields(
        dict(zip(("without", "with the hook"), (text or "(nothing)" for text in answers), strict=True))
    )
    _losses(parts, report["tolerance"])
    output.emit_heading("\nMedian step time, and peak memory above the weights")
    rows, memory = [], []
    for title, part in parts.items():
        sides = part["plain"], part["hooked"]
        times = (readable_time(median(side["step_seconds"])) for side in sides)
        peaks = [side["peak_bytes"] / MEBIBYTE for side in sides]
        rows.append((title, *times, *(f"{peak:,.0f} MiB" for peak in peaks)))
        memory.append(f"{peaks[1] / peaks[0]:.2f} ({title})")
    output.emit_table(("training", "time without", "with", "memory without", "with"), rows)
    output.emit("\n")
    output.emit_fields({"memory, ratio": memory, "time, ratio": ratio(report["step_time"])})
    output.emit_heading("\nWhat the hook did")
    kernels = sorted(
        {f"{op} ({backend})" for part in parts.values() for op, backend in part["hooked"]["kernels"]}
    )
    output.emit_fields({"kernels": kernels, "see it": f"veomni-hook diff {first['model_type']}"})
    bad = {title: part["problems"] for title, part in parts.items() if part["problems"]}
    if bad:
        output.emit_heading("\nThe hook FAILED")
        output.emit_fields(bad)


def _losses(parts: dict[str, Part], tolerance: float) -> None:
    output.emit_heading("\nLosses without the hook, and with it")
    count = max(len(part["differences"]) for part in parts.values())
    chosen = sorted({round(i * (count - 1) / (SHOWN_STEPS - 1)) for i in range(SHOWN_STEPS)})
    headers = ["step", *(word for title in parts for word in (title, "with"))]
    curves = [part[side]["losses"] for part in parts.values() for side in ("plain", "hooked")]
    output.emit_table(
        headers,
        [(i + 1, *(f"{curve[i]:.5f}" if i < len(curve) else "-" for curve in curves)) for i in chosen],
    )
    output.emit("\n")
    output.emit_fields({title: _agreement(part, tolerance) for title, part in parts.items()})


def _agreement(part: Part, tolerance: float) -> str:
    largest = max(part["differences"])
    agreement = "equal" if largest <= tolerance else "NOT EQUAL"
    sides = [len(part[side]["losses"]) for side in ("plain", "hooked")]
    if sides[0] != sides[1]:
        agreement = f"NOT EQUAL: {sides[0]} steps without the hook, {sides[1]} with it"
    return f"{agreement} (largest relative difference {largest:.1e}, limit {tolerance:.0e})"


def ratio(found: Facts) -> str:
    """Return a sentence about a ratio of times; ``found`` is what `significance.compare` returned."""
    if found["verdict"] == FEW:
        return "too few steps to tell a difference (--steps 20)"
    value, low, high = (f"{found[name]:.2f}" for name in ("ratio", "low", "high"))
    interval = f"95% interval {low} to {high}, {found['pairs']} pairs of steps"
    words = {NOISY: "but this machine is too noisy to tell a difference", SAME: "no difference beyond 5%"}
    return f"{value}, {words.get(found['verdict'], found['verdict'])} ({interval})"
