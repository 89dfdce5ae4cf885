"""Data of the tables in docs/, a row a line: `python -m scripts.tables` writes what needs only the code.

docs/assets/tables.js shows each as a table with a search, below the first link to it in a page.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from veomni_hook.kernels.selection.declaration import REFERENCE
from veomni_hook.kernels.selection.registry import registry
from veomni_hook.patches.reasons import Code
from veomni_hook.tools.coverage import denominators

DATA = Path(__file__).resolve().parents[1] / "docs" / "data"
#: Where what a script has written into a page ends; it begins with a comment that names the script.
END = "<!-- end -->\n"

#: A cell is text, a number, or a list of texts with a line each.
Row = Mapping[str, Any]


def text(rows: Iterable[Row]) -> str:
    """Return the content of a data file."""
    return "[\n" + ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n]\n"


def read(name: str) -> list[dict[str, Any]]:
    """Return the rows of a data file."""
    rows: list[dict[str, Any]] = json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))
    return rows


def write(name: str, rows: Iterable[Row]) -> None:
    """Write a data file."""
    (DATA / f"{name}.json").write_text(text(rows), encoding="utf-8")


def placed(page: str, begin: str, lines: Iterable[str]) -> str:
    """Return a page with the lines between the comment ``begin`` and the next `END`.

    Raises:
        SystemExit: the page has no such comments.
    """
    before, there, rest = page.partition(begin)
    _, end, after = rest.partition(END)
    if not there or not end:
        raise SystemExit(f"the page has no markers {begin}{END}")
    return "\n".join([before + begin, *lines, "", end]) + after


def kernels() -> list[Row]:
    """Return a row for each variant of each op; a kernel in brackets runs only if it is named."""
    rows = []
    for op in registry.ops().values():
        for name, variant in op.variants.items():
            backends = [
                kernel.backend if kernel.automatic else f"({kernel.backend})"
                for kernel in registry.kernels(op.name, name)
                if kernel.backend != REFERENCE
            ]
            rows.append({"op": op.name, "variant": name, "formula": variant.formula, "kernels": backends})
    return rows


def candidates() -> list[Row]:
    """Return what counts as a candidate of each op."""
    return [{"op": op, "counted": sentence} for op, said in denominators().items() for sentence in said]


def causes() -> list[Row]:
    """Return the causes of what is not routed."""
    return [
        {"code": str(code), "what it says": code.meaning, "what can be done": code.remedy} for code in Code
    ]


#: The tables that need nothing but the code, by the names of their files.
TABLES = {"kernels": kernels, "candidates": candidates, "causes": causes}


def main() -> None:
    """Write them."""
    for name, rows in TABLES.items():
        write(name, rows())


if __name__ == "__main__":
    main()
