"""What documents say of ops and idioms: written by `python -m scripts.kernels`.

Presets, variants and kernels in docs/kernels.md; causes and candidates in docs/coverage.md.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from textwrap import fill

from veomni_hook.kernels.selection.declaration import REFERENCE
from veomni_hook.kernels.selection.registry import registry
from veomni_hook.patches.reasons import Code
from veomni_hook.tools.coverage import denominators

DOCS = Path(__file__).resolve().parents[1] / "docs"
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


def causes() -> str:
    """Return the causes of reasons and their remedies as Markdown."""
    rows = [f"| `{code}` | {code.meaning} | {code.remedy} |" for code in Code]
    return "\n".join(["| Code | What it says | What can be done |", "| --- | --- | --- |", *rows]) + "\n"


def candidates() -> str:
    """Return what counts as a candidate of every op as Markdown."""
    said = (f"- `{op}`: {sentence}" for op, every in denominators().items() for sentence in every)
    wrap = partial(fill, width=120, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)
    return "\n".join(map(wrap, said)) + "\n"


#: What stands between the marks of a document, in this order.
WRITTEN: dict[str, tuple[Callable[[], str], ...]] = {
    "kernels.md": (tables,),
    "coverage.md": (causes, candidates),
}


def written(name: str) -> str:
    """Return a document with what the code says today."""
    parts = iter(WRITTEN[name])
    document = (DOCS / name).read_text(encoding="utf-8")
    marks = f"(?s){BEGIN}.*?{END}"
    return re.sub(marks, lambda _: f"{BEGIN}\n{next(parts)()}\n{END}", document)


def main() -> None:
    """Write the documents."""
    for name in WRITTEN:
        (DOCS / name).write_text(written(name), encoding="utf-8")


if __name__ == "__main__":
    main()
