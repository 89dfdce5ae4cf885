"""The side-by-side diff: upstream left, patched right, and the reason of each patch above its lines."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from veomni_hook.tools.report.colour import coloured
from veomni_hook.tools.report.html import Html, join, tag
from veomni_hook.tools.report.lines import Kind, Pair, Run, pairs, runs, split

__all__ = ["Sides", "line_id", "side_by_side", "tally"]

#: The signs beside line numbers: on the left, on the right.
_SIGNS = {
    Kind.SAME: ("", ""),
    Kind.MOVED: ("", "→"),
    Kind.ADDED: ("", "+"),
    Kind.REMOVED: ("−", ""),  # noqa: RUF001 - the minus sign
    Kind.CHANGED: ("−", "+"),  # noqa: RUF001
}
_DEFINITION = re.compile(r"(?:async +)?(?:class|def) +(\w+)")
_DEEPEST = 40
_NAMED = 6


@dataclass(frozen=True)
class Sides:
    """Two texts to show side by side.

    Attributes:
        id: the prefix of the right lines' ids; unique on the page.
        left, right: the texts.
        names: short descriptions of the two.
        first: the number of the first line of ``right`` in its file.
        notes: the notes above lines of the right text, by line number.
    """

    id: str
    left: str
    right: str
    names: tuple[str, str]
    first: int
    notes: Mapping[int, Sequence[Html]]


def line_id(id_: str, number: int) -> str:
    """Return the id of a line of the right text."""
    return f"{id_}-line-{number}"


def tally(left: str, right: str) -> dict[Kind, int]:
    """Return the number of lines of each kind."""
    found = pairs(split(left), split(right))
    return {kind: sum(pair.kind is kind for pair in found) for kind in Kind}


def side_by_side(sides: Sides) -> Html:
    """Return the diff of two Python texts; unchanged parts are folded, and unfold without a script."""
    shown = _Shown(sides)
    heads = tag("div", *(tag("div", name) for name in sides.names), class_="sides", aria_hidden="true")
    parts = [shown.folded(run) if run.folded else shown.table(run.pairs) for run in shown.runs]
    return tag("div", heads, *parts, class_="diff")


class _Shown:
    """The coloured lines of both texts, and the places of notes."""

    def __init__(self, sides: Sides) -> None:
        self.sides = sides
        self.lines = split(sides.left)
        right = split(sides.right)
        self.left, self.right = coloured(self.lines), coloured(right)
        self.indents = ([_indent(line) for line in self.lines], [_indent(line) for line in right])
        found = pairs(self.lines, right)
        self.notes = _placed(sides, found)
        self.runs = runs(found)

    def folded(self, run: Run) -> Html:
        """Return unchanged lines, folded."""
        first, last = run.pairs[0], run.pairs[-1]
        count = len(run.pairs)
        span = f"{self.number(first)}–{self.number(last)}"  # noqa: RUF001 - a range
        names = [
            found[1]
            for pair in run.pairs
            if pair.left is not None
            if (found := _DEFINITION.match(self.lines[pair.left]))
        ]
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        named = f": {', '.join(names[:_NAMED])}{more}" if names else ""
        said = f"{count} unchanged line{'' if count == 1 else 's'}, {span}{named}"
        # A note may belong to an unchanged line, if the patch only removed lines there.
        is_open = any(pair in self.notes for pair in run.pairs)
        return tag("details", tag("summary", said), self.table(run.pairs), open=is_open)

    def table(self, group: Sequence[Pair]) -> Html:
        """Return pairs as a table of four columns: the line numbers and texts of both sides."""
        first, last = self.number(group[0]), self.number(group[-1])
        left, right = self.sides.names
        heads = (f"Line, {left}", left, f"Line, {right}", right)
        return tag(
            "table",
            tag("caption", f"Lines {first} to {last}", class_="sr"),
            _COLUMNS,
            tag("thead", tag("tr", *(tag("th", head, scope="col") for head in heads)), class_="sr"),
            *self._bodies(group),
            aria_label=f"{left} beside {right}, lines {first} to {last}",
        )

    def number(self, pair: Pair) -> str:
        """Return the line number of a pair in the right text, or in the left one if there is none."""
        return str(self.sides.first + pair.right if pair.right is not None else (pair.left or 0) + 1)

    def _bodies(self, group: Sequence[Pair]) -> Iterator[Html]:
        """Groups of rows that stay together when the sides are stacked, with notes between them."""
        held: list[Pair] = []
        for pair in group:
            notes = self.notes.get(pair, ())
            if held and (notes or (held[-1].kind is Kind.SAME) is not (pair.kind is Kind.SAME)):
                yield self._body(held)
                held = []
            if notes:
                cell = tag("td", *notes, colspan=4)
                yield tag("tbody", tag("tr", cell), class_="note")
            held.append(pair)
        yield self._body(held)

    def _body(self, group: Sequence[Pair]) -> Html:
        kind = "same" if group[0].kind is Kind.SAME else "change"
        return tag("tbody", *map(self._row, group), class_=kind)

    def _row(self, pair: Pair) -> Html:
        signs = _SIGNS[pair.kind]
        cells = (*self._left(pair, signs[0]), *self._right(pair, signs[1]))
        return tag("tr", *cells, class_=None if pair.kind is Kind.SAME else str(pair.kind))

    def _left(self, pair: Pair, sign: str) -> tuple[Html, Html]:
        if pair.left is None:
            return _EMPTY
        content = tag("del", self.left[pair.left]) if sign else self.left[pair.left]
        number = tag("td", _numbered(pair.left + 1, sign), class_="n l")
        return number, tag("td", content, class_=f"c{self.indents[0][pair.left]}")

    def _right(self, pair: Pair, sign: str) -> tuple[Html, Html]:
        if pair.right is None:
            return _EMPTY
        line = self.sides.first + pair.right
        content = tag("ins", self.right[pair.right]) if sign == "+" else self.right[pair.right]
        number = tag("td", _numbered(line, sign), class_="n r", id=line_id(self.sides.id, line))
        return number, tag("td", content, class_=f"c{self.indents[1][pair.right]}")


_COLUMNS = tag("colgroup", tag("col", class_="n"), tag("col"), tag("col", class_="n"), tag("col"))
_EMPTY = (tag("td", class_="n e"), tag("td", class_="c e"))


def _numbered(number: int, sign: str) -> Html:
    return join([number, tag("b", sign) if sign else None], " " if sign else "")


def _indent(line: str) -> str:
    """The class that indents the continuation of a wrapped line."""
    width = min(len(line) - len(line.lstrip()), _DEEPEST) // 4 * 4
    return f" i{width}" if width else ""


def _placed(sides: Sides, found: Sequence[Pair]) -> dict[Pair, list[Html]]:
    """The notes by the pair below them: the line itself, or the removed lines directly above it."""
    placed: dict[Pair, list[Html]] = {}
    for line, notes in sorted(sides.notes.items()):
        wanted = line - sides.first
        at = next(
            (at for at, pair in enumerate(found) if pair.right is not None and pair.right >= wanted),
            len(found) - 1,
        )
        while found[at].kind is Kind.SAME and at > 0 and found[at - 1].kind is Kind.REMOVED:
            at -= 1
        while found[at].kind is Kind.REMOVED and at > 0 and found[at - 1].kind is Kind.REMOVED:
            at -= 1
        placed.setdefault(found[at], []).extend(notes)
    return placed
