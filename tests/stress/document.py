"""docs/data/stress.json and the sums in docs/maintain/stress.md: made from the result of a run."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import Any

from scripts import tables
from tests.stress.result import COLUMNS, Part, markdown, table
from tests.stress.stand import ROOT
from tests.stress.tamperings import HARMLESS, REFUSED, REPAIRED, TAMPERINGS, Tampering

PAGE = ROOT / "docs" / "maintain" / "stress.md"
BEGIN = "<!-- written by make stress ARGS=--document -->\n"


def write(parts: Sequence[Part]) -> None:
    """Write what a run of all parts found."""
    tables.write("stress", rows(parts))
    page = tables.placed(PAGE.read_text(encoding="utf-8"), BEGIN, sums(parts).splitlines())
    PAGE.write_text(page, encoding="utf-8")


def rows(parts: Sequence[Part]) -> Iterator[dict[str, Any]]:
    """Yield a row for each line of each part; of a tampering, the note says what comes of it."""
    for part in parts:
        lines = part.lines
        if part.name == "tampering":
            lines = [replace(line, note=outcomes(one)) for one, line in zip(TAMPERINGS, lines, strict=True)]
        yield from (dict(zip(COLUMNS, row, strict=True)) for row in table([replace(part, lines=lines)])[:-1])


def sums(parts: Sequence[Part]) -> str:
    """Return on which machine the parts ran, and the sum of each, as Markdown."""
    machine = (
        f"Python {platform.python_version()}, torch {version('torch').partition('+')[0]}, "
        f"transformers {version('transformers')}, {os.cpu_count()} cores:"
    )
    return f"{machine}\n\n{markdown(COLUMNS, [table([part])[-1] for part in parts])}"


def outcomes(one: Tampering) -> str:
    """Return what is done, to which pieces, and what comes of it."""
    words = {REPAIRED: "repaired", REFUSED: "refused", HARMLESS: "harmless"}
    others = "".join(f"; {piece}: {words[other]}" for piece, other in one.outcomes)
    return f"{one.description}, to {', '.join(one.pieces)}: {words[one.outcome]}{others}"
