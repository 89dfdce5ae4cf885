"""`veomni-hook demo`: the same models without and with the hook, measured alternately and compared.

Each measurement runs in its own process; this process only starts them, compares and prints. The exit status
is 1 if losses differ or if the hook patched nothing. Speed does not affect it: it depends on the machine.
"""

from __future__ import annotations

import json
import math
from enum import StrEnum
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from veomni_hook.cli import output
from veomni_hook.cli.demo.turns import WARM_UP, compare
from veomni_hook.cli.usage import FOUND, UsageError

MODULE = "transformers.models.qwen3.modeling_qwen3"
# Relative, at every step. Kernels that fuse or reorder float32 sums differ in the last bits of a gradient.
# Adam amplifies that: its first steps are the sign of the gradient. Measured on a CPU: about 1e-7.
TOLERANCE = 1e-4
FOLDER = Path("demo_output")
INSTALL = "pip install 'veomni-hook[demo]'"


class Part(StrEnum):
    """A part of the demo."""

    TRAINING = "training"
    VOCABULARY = "vocabulary"
    EXPERTS = "experts"
    IMPORTS = "imports"


def demo(
    parts: Annotated[
        list[Part] | None,
        typer.Option("--part", help="Run this part alone; give it several times for several parts."),
    ] = None,
    steps: Annotated[int, typer.Option(min=2, help="Optimizer steps of each of the two trainings.")] = 20,
    rounds: Annotated[
        int, typer.Option(min=1, help="Timed steps of each model in the parts vocabulary and experts.")
    ] = 9,
    seed: Annotated[int, typer.Option(help="Seed of the training's weights and text.")] = 0,
    folder: Annotated[
        Path, typer.Option("--output", help="Folder for the report, the plot and the patched sources.")
    ] = FOLDER,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,  # noqa: FBT002
) -> None:
    """Train small models alternately without and with the hook; compare losses, times and memory.

    training: a small Qwen3 with transformers' Trainer: loss curves and step time.
    vocabulary: a step of a small Qwen3 with the real vocabulary of 151,936: time and memory.
    experts: a step of a small Qwen3-MoE with 64 experts: time and memory.
    imports: what the hook adds to an import.
    """
    chosen = [part.value for part in Part if not parts or part in parts]
    if Part.TRAINING in chosen and find_spec("accelerate") is None:
        raise UsageError(
            "the part training needs accelerate, which transformers' Trainer imports",
            where="this Python environment",
            fix=f"{INSTALL}, or run the other parts: veomni-hook demo --part vocabulary --part experts",
        )
    script = training_script()
    _check_folder(folder if folder == FOLDER else folder.resolve())
    report = measure(script, folder, chosen, {"steps": steps, "rounds": rounds, "seed": seed})
    (folder / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if as_json:
        output.emit_json(report)
    else:
        from veomni_hook.cli.demo.text import show

        show(report, script)
    _draw(report, folder, quiet=as_json)
    if not report["equal"]:
        raise typer.Exit(FOUND)


def _draw(report: dict[str, Any], folder: Path, *, quiet: bool) -> None:
    """Draw the plot and print where the files are; without matplotlib there is no plot."""
    files = {"report": folder / "report.json"}
    try:
        from veomni_hook.cli.demo.plot import write_plot

        write_plot(report, folder / "demo.png")
        files["plot"] = folder / "demo.png"
    except ImportError as error:
        output.warn(f"no plot was drawn, because matplotlib cannot be imported ({error}): {INSTALL}")
    if not quiet:
        output.emit_heading("\nFiles")
        output.emit_fields(files)


def training_script() -> Path:
    """Return the training script: next to the package in a checkout, inside it in an installed wheel.

    Raises:
        UsageError: neither exists.
    """
    package = Path(__file__).resolve().parents[2]
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


def measure(script: Path, folder: Path, parts: list[str], options: dict[str, int]) -> dict[str, Any]:
    """Run the parts and return the whole report.

    Args:
        script: the training script, run unchanged.
        folder: where the patched sources of the hooked training are written, below `patched/`.
        parts: names of `Part`.
        options: `steps` and `seed` of the training, `rounds` of the others.

    Raises:
        typer.Exit: one of the processes failed; its output has been shown.
    """
    from veomni_hook.cli.demo.processes import gather

    patched = folder.resolve() / "patched"
    for file in set(patched.rglob("*.py")):
        file.unlink()
    found = gather(script, patched, parts, options)
    report: dict[str, Any] = {"transformers": version("transformers"), "parts": parts}
    if Part.TRAINING in parts:
        report["training"] = trained(found.pop("plain"), found.pop("hooked"))
        report["training"]["patches"] = patches_of(MODULE)
        sources = sorted(str(file) for file in patched.rglob("*.py"))
        report["training"]["patched_sources"] = sources
        report["training"]["equal"] &= bool(sources)
    for part in (Part.VOCABULARY, Part.EXPERTS):
        if part in found:
            stepped(found[part])
    report |= found
    report["equal"] = all(report[part].get("equal", True) for part in parts)
    return report


def trained(plain: dict[str, Any], hooked: dict[str, Any]) -> dict[str, Any]:
    """Return the comparison of two trainings: loss curves, and step times without the first steps."""
    found = differences(plain["losses"], hooked["losses"])
    shared = min(len(plain["losses"]), len(hooked["losses"]))
    timed = slice(min(WARM_UP, shared - 1), shared)
    return {
        "module": MODULE,
        "plain": plain,
        "hooked": hooked,
        "differences": found,
        "tolerance": TOLERANCE,
        "equal": max(found) <= TOLERANCE,
        "step_time": compare(plain["step_seconds"][timed], hooked["step_seconds"][timed]).to_dict(),
    }


def stepped(part: dict[str, Any]) -> None:
    """Add the comparison of the two models to a part of the probe: `difference`, `equal` and `step_time`."""
    plain, hooked = part["plain"], part["hooked"]
    names = ("loss", "gradient_norm")
    part["difference"] = max(differences([plain[n] for n in names], [hooked[n] for n in names]))
    part["equal"] = part["difference"] <= part["tolerance"]
    part["step_time"] = compare(plain["step_seconds"], hooked["step_seconds"]).to_dict()


def differences(plain: list[float], hooked: list[float]) -> list[float]:
    """Return the relative difference of two loss curves at each step; infinite after one curve has ended."""
    shared = [abs(b - a) / abs(a) for a, b in zip(plain, hooked, strict=False)]
    # Every comparison with nan is false; as infinity it counts as a difference.
    ended = [math.inf] * abs(len(plain) - len(hooked))
    return [math.inf if math.isnan(value) else value for value in shared] + ended


def patches_of(module: str) -> dict[str, Any]:
    """Return a module's report and the cached file that imports execute, without importing torch."""
    from veomni_hook.finders.prepare import prepare
    from veomni_hook.settings import resolve

    prepared = prepare(module, resolve().settings)
    applied = prepared.report.to_dict()["applied"] if prepared.report is not None else []
    return {"applied": applied, "stored": prepared.stored_path, "reason": prepared.reason}
