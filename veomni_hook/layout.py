"""Text output formatted to a width: tables, blocks, fields and paragraphs.

Words are never broken, and figures are never separated from their units; longer ones overflow the line. A
table that does not fit a narrow width becomes one block per entry. Control characters are escaped. Not by
rich: it breaks long words, parts figures from their units, and has no blocks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from textwrap import fill
from typing import NamedTuple

from veomni_hook.printable import printable

__all__ = ["NARROW", "Line", "counted", "fields", "paragraphs", "shortened", "table"]

#: Below this many columns a table that does not fit becomes blocks, unless it has only two columns.
NARROW = 100

GAP = 2  # columns between two cells
SHORT = 20  # columns up to this width keep it; wider ones share the rest
LEAST = 24  # minimum width of a wrapped column
ROOM = 24  # if less room is left beside its name, a value starts on the next line
FIGURE = re.compile(r"(?<=\d) (?=(?:%|[num]?s|[KMGT]?i?B)(?!\w))")
GLUE = "\ue000"  # joins a figure and its unit during wrapping; occurs in no text


class Line(NamedTuple):
    """One line of a table; ``head`` marks a line of the header row, or of a block's first field."""

    text: str
    head: bool = False


def counted(count: int, one: str, many: str = "") -> str:
    """Return a count with its noun: ``1 module``, ``2 modules``; ``many`` is the plural if irregular."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def shortened(names: Sequence[str], most: int = 3) -> str:
    """Return the first names, and how many more there are: ``llama, qwen2, qwen3 and 2 more``."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


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
        rows: the cells; in a block, empty cells and ``-`` are omitted.
        width: the maximum width in columns; None: no limit.
        optional: columns to omit, the last first, if that makes the table fit; a line then names them.
    """
    cells = [[printable(cell) for cell in row] for row in rows]
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
    """Return name and value pairs, indented, one per line; values that are too wide continue below."""
    pairs = {printable(name): printable(value) for name, value in pairs.items()}
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
    """Return text with each line wrapped to a width; continuation lines are indented further."""
    text = printable(text)
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
    """Return the column widths with the wide columns wrapped, or None if these would get too narrow."""
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
        cell_lines = [
            [cell] if widths is None else _filled(cell, column).split("\n")
            for cell, column in zip(row, columns, strict=True)
        ]
        for at in range(max(map(len, cell_lines), default=0)):
            texts = (part[at] if at < len(part) else "" for part in cell_lines)
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
    """Return the text wrapped after ``start``, further lines after ``after``; words are not broken."""
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
