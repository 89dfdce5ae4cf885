"""The table of decisions: what every variant gets on every system under `auto` and under every preset.

``python -m tests.kernels.decisions`` writes `decisions.txt` anew; `test_decisions` compares.
"""

from __future__ import annotations

from pathlib import Path

from veomni_hook.kernels.selection.choice import parse_choice
from veomni_hook.kernels.selection.registry import registry
from veomni_hook.kernels.selection.select import select
from veomni_hook.kernels.selection.system import System

TABLE = Path(__file__).with_name("decisions.txt")
SYSTEMS = ("cpu", "sm75", "sm80", "sm90", "sm100", "ascend")


def decisions() -> str:
    """Return the table as text."""
    lines = []
    for choice in registry.backends():
        if choice in ("eager", "reference"):
            continue  # the same for every variant: test_select
        lines.append(f"kernels={choice}")
        for op in registry.ops().values():
            found = {variant: _row(op.name, variant, choice) for variant in op.variants}
            for row in dict.fromkeys(found.values()):
                variants = ", ".join(variant for variant, other in found.items() if other == row)
                lines += [f"  {op.name}: {variants}", f"    {row}"]
    return "\n".join(lines) + "\n"


def _row(op: str, variant: str, choice: str) -> str:
    said: dict[str, list[str]] = {}
    for system in SYSTEMS:
        selected = select(op, variant, parse_choice(choice), System.named(system))
        names = ">".join(kernel.backend for kernel in selected.candidates)
        said.setdefault("error" if selected.failure else names or "eager", []).append(system)
    return "; ".join(f"{' '.join(systems)}: {names}" for names, systems in said.items())


if __name__ == "__main__":
    TABLE.write_text(decisions(), encoding="utf-8")
