"""Text for people, laid out to a width: tables, blocks, fields and paragraphs.

No word is ever broken, and no figure is separated from its unit: what is longer than a line overflows it. A
table that does not fit a narrow place becomes one block an entry.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from textwrap import fill
from typing import NamedTuple

__all__ = ["NARROW", "Line", "counted", "fields", "paragraphs", "table"]

#: Below this many columns a table that does not fit becomes blocks, unless it has only two columns.
NARROW = 100

GAP = 2  # columns between two cells
SHORT = 20  # a column up to this width keeps it; the wider ones share what is left
LEAST = 24  # a column that is wrapped has at least this width
ROOM = 24  # with less room beside its name, a value goes below it
FIGURE = re.compile(r"(?<=\d) (?=(?:%|[num]?s|[KMGT]?i?B)(?!\w))")
GLUE = "\ue000"  # stands between a figure and its unit while lines are broken; no text has it


class Line(NamedTuple):
    """One line of a table; ``head`` is whether it is the line of its headers, or the first of a block."""

    text: str
    head: bool = False


def counted(count: int, one: str, many: str = "") -> str:
    """Return a count with its noun: ``1 module``, ``2 modules``; ``many`` is the plural if not with an s."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def table(
    headers: Sequence[str],
    rows: Iterable[Sequence[str]],
    width: int | None = None,
    *,
    optional: Sequence[str] = (),
) -> list[Line]:
    """Return the lines of a table.

    Args:
        headers: the names of the columns.
        rows: the cells; an empty one, or one of ``-``, has no line in a block.
        width: how many columns there are; None: as many as it takes.
        optional: columns to leave out, the last first, where that lets the table fit; a line then names them.
    """
    cells = [list(row) for row in rows]
    if width is None or _natural(headers, cells) <= width:
        return _aligned(headers, cells)
    if (width >= NARROW or len(headers) == 2) and (widths := _shared(headers, cells, width)):
        return _aligned(headers, cells, widths)
    for kept in range(len(optional) - 1, -1, -1):
        left_out = optional[kept:]
        at = [column for column, header in enumerate(headers) if header not in left_out]
        fewer = [[row[column] for column in at] for row in cells]
        names = [headers[column] for column in at]
        if _natural(names, fewer) <= width:
            said = paragraphs(f"not shown at this width: {', '.join(left_out)}", width)
            return [*_aligned(names, fewer), *(Line(text) for text in said.split("\n"))]
    return _blocks(headers, cells, width)


def fields(pairs: Mapping[str, str], width: int | None = None) -> str:
    """Return name and value pairs, indented, one a line; a value that is too wide goes on below itself."""
    longest = max((len(name) for name in pairs), default=0)
    lines = []
    for name, value in pairs.items():
        start = f"  {name.ljust(longest)}{' ' * GAP}"
        if width is not None and len(start) + len(value) > width and width - len(start) < ROOM:
            lines += [f"  {name}", _filled(value, width, " " * 6)]
        else:
            lines.append(_filled(value, width, start, " " * len(start)))
    return "".join(line.rstrip() + "\n" for line in lines)


def paragraphs(text: str, width: int | None = None, *, indent: int = 2) -> str:
    """Return text with each of its lines broken to a width; what goes on is indented more than it begins."""
    if width is None:
        return text
    lines = []
    for line in text.split("\n"):
        start = line[: len(line) - len(line.lstrip(" "))]
        lines.append(_filled(line.strip(" "), width, start, start + " " * indent))
    return "\n".join(lines)


def _natural(headers: Sequence[str], cells: Sequence[Sequence[str]]) -> int:
    return sum(_widths(headers, cells)) + GAP * (len(headers) - 1)


def _widths(headers: Sequence[str], cells: Sequence[Sequence[str]]) -> list[int]:
    return [max(len(line[column]) for line in (headers, *cells)) for column in range(len(headers))]


def _shared(headers: Sequence[str], cells: Sequence[Sequence[str]], width: int) -> list[int] | None:
    """The widths of the columns where the wide ones are wrapped; None where that leaves them too little."""
    widths = _widths(headers, cells)
    wide = [column for column, needed in enumerate(widths) if needed > SHORT]
    least = {column: max(LEAST, *(_longest(row[column]) for row in cells)) for column in wide}
    least = {column: min(widths[column], least[column]) for column in wide}
    rest = width - GAP * (len(widths) - 1) - sum(widths) + sum(widths[column] for column in wide)
    rest -= sum(least.values())
    if rest < 0:
        return None
    wide.sort(key=lambda column: widths[column] - least[column])
    for left, column in zip(range(len(wide), 0, -1), wide, strict=True):
        more = min(widths[column] - least[column], rest // left)
        widths[column] = least[column] + more
        rest -= more
    return widths


def _longest(text: str) -> int:
    return max((len(word) for word in FIGURE.sub(GLUE, text).split()), default=0)


def _aligned(
    headers: Sequence[str], cells: Sequence[Sequence[str]], widths: Sequence[int] | None = None
) -> list[Line]:
    lines: list[Line] = []
    columns = widths or _widths(headers, cells)
    for row in (headers, *cells):
        held = [
            [cell] if widths is None else _filled(cell, column).split("\n")
            for cell, column in zip(row, columns, strict=True)
        ]
        for at in range(max(map(len, held), default=0)):
            texts = (part[at] if at < len(part) else "" for part in held)
            padded = (text.ljust(column) for text, column in zip(texts, columns, strict=True))
            lines.append(Line((" " * GAP).join(padded).rstrip(), head=row is headers))
    return lines


def _blocks(headers: Sequence[str], cells: Sequence[Sequence[str]], width: int) -> list[Line]:
    longest = max(map(len, headers))
    lines: list[Line] = []
    for row in cells:
        if lines:
            lines.append(Line(""))
        told = [(header, cell) for header, cell in zip(headers, row, strict=True) if cell not in ("", "-")]
        for number, (header, cell) in enumerate(told):
            start = header.ljust(longest) + " " * GAP
            text = _filled(cell, width, start, " " * len(start))
            lines += [Line(one.rstrip(), head=number == 0) for one in text.split("\n")]
    return lines


def _filled(text: str, width: int | None, start: str = "", after: str | None = None) -> str:
    """The text after ``start``, its further lines after another one; never within a word."""
    if width is None:
        return start + text
    whole = fill(
        FIGURE.sub(GLUE, text),
        width,
        initial_indent=start,
        subsequent_indent=start if after is None else after,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return (whole or start).replace(GLUE, " ")
