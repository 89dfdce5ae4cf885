"""The recipes as documents: `python -m scripts.recipes` writes the code in docs/recipes.md and the notebook.

Both are made of the scripts in examples/recipes, which the tests run.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECIPES = ROOT / "examples" / "recipes"
DOCUMENT = ROOT / "docs" / "recipes.md"
NOTEBOOK = RECIPES / "notebook.ipynb"

CELL = "# %%\n"
BLOCK = re.compile(r"(<!-- examples/recipes/(\w+\.\w+) -->\n\n```\w+\n).*?(^```$)", re.DOTALL | re.MULTILINE)
DOCSTRING = re.compile(r'\A"""(.*?)"""\n+', re.DOTALL)


def code(name: str) -> str:
    """Return the text of a recipe without its docstring, which the document says in its own words."""
    return DOCSTRING.sub("", (RECIPES / name).read_text(encoding="utf-8"))


def written(document: str) -> str:
    """Return the document with today's scripts below their markers."""
    return BLOCK.sub(lambda found: found[1] + code(found[2]) + found[3], document)


def included(document: str) -> list[str]:
    """Return the names of the scripts that the document shows, in its order."""
    return [found[2] for found in BLOCK.finditer(document)]


def notebook() -> str:
    """Return the notebook that ``notebook.py`` stands for."""
    cells = [part.strip("\n") for part in code(NOTEBOOK.with_suffix(".py").name).split(CELL) if part.strip()]
    made: dict[str, Any] = {
        "cells": [_cell(at, text) for at, text in enumerate(cells)],
        "metadata": {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(made, indent=1) + "\n"


def _cell(at: int, text: str) -> dict[str, Any]:
    return {
        "cell_type": "code",
        "execution_count": None,
        "id": f"cell-{at}",
        "metadata": {},
        "outputs": [],
        "source": text.splitlines(keepends=True),
    }


def main() -> None:
    """Write the document and the notebook."""
    DOCUMENT.write_text(written(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
    NOTEBOOK.write_text(notebook(), encoding="utf-8")


if __name__ == "__main__":
    main()
