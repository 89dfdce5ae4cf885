"""The table of ops, variants and kernels in docs/kernels.md: written by `python -m scripts.kernels`."""

from __future__ import annotations

from pathlib import Path

from veomni_hook.kernels.selection.declaration import REFERENCE
from veomni_hook.kernels.selection.registry import registry

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "kernels.md"
BEGIN, END = "<!-- written by python -m scripts.kernels -->\n", "<!-- end -->\n"


def tables() -> str:
    """Return the presets and the variants of every op as Markdown."""
    lines = ["| Preset | Ops that it stands for |", "|---|---|"]
    for backend in registry.backends()[2:]:
        lines.append(f"| `{backend}` | {', '.join(f'`{op}`' for op in registry.preset(backend))} |")
    for op in registry.ops().values():
        lines += [
            "",
            f"### {op.name}",
            "",
            "| Variant | Formula | Kernels beside the reference |",
            "|---|---|---|",
        ]
        for name, variant in op.variants.items():
            kernels = [each for each in registry.kernels(op.name, name) if each.backend != REFERENCE]
            shown = ", ".join(each.backend if each.automatic else f"({each.backend})" for each in kernels)
            formula = variant.formula.replace("|", "\\|")
            lines.append(f"| `{name}` | {formula} | {shown or 'none'} |")
    return "\n".join(lines) + "\n"


def written(document: str) -> str:
    """Return the document with today's tables."""
    head, _, rest = document.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return head + BEGIN + "\n" + tables() + "\n" + END + tail


def main() -> None:
    """Write the document."""
    DOCUMENT.write_text(written(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
