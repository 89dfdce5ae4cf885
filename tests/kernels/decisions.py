"""What every variant gets on every system under `auto` and by each backend's name: ``<op>/decisions.txt``.

``python -m tests.kernels.decisions`` writes them anew; `test_decisions` compares.
"""

from __future__ import annotations

from pathlib import Path

from veomni_hook.kernels.selection.choice import parse_choice
from veomni_hook.kernels.selection.registry import built_in, registry
from veomni_hook.kernels.selection.select import select
from veomni_hook.kernels.selection.system import System

SYSTEMS = ("cpu", "sm75", "sm80", "sm90", "sm100", "rocm", "ascend")


def table(op: str) -> Path:
    """Return the file of an op's decisions."""
    return Path(__file__).with_name(op) / "decisions.txt"


def decisions(op: str) -> str:
    """Return an op's decisions as text."""
    lines = []
    for choice in registry.backends(op):
        if choice in ("eager", "reference"):
            continue  # the same for every variant: test_select
        lines.append(f"{op}={choice}")
        found = {variant: _row(op, variant, choice) for variant in registry.op(op).variants}
        for row in dict.fromkeys(found.values()):
            variants = ", ".join(variant for variant, other in found.items() if other == row)
            lines += [f"  {variants}", f"    {row}"]
    return "\n".join(lines) + "\n"


def _row(op: str, variant: str, choice: str) -> str:
    said: dict[str, list[str]] = {}
    for system in SYSTEMS:
        selected = select(op, variant, parse_choice(f"{op}={choice}"), System.named(system))
        names = ">".join(kernel.backend for kernel in selected.candidates)
        said.setdefault("error" if selected.failure else names or "eager", []).append(system)
    return "; ".join(f"{' '.join(systems)}: {names}" for names, systems in said.items())


if __name__ == "__main__":
    for name in built_in():
        table(name).write_text(decisions(name), encoding="utf-8")
