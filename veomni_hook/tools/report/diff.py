"""The side-by-side diff: upstream left, patched right, and the patches that are noted above their lines."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from markupsafe import Markup
from pygments import token  # type: ignore[import-untyped]
from pygments.lexers.python import PythonLexer  # type: ignore[import-untyped]

from veomni_hook.layout import counted, shortened
from veomni_hook.tools.report.lines import Kind, Pair, pairs, runs, split
from veomni_hook.tools.report.model import Change, Module
from veomni_hook.tools.report.page import text

__all__ = ["coloured", "side_by_side"]

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
#: The classes of what is coloured.
_COLOURS = {
    token.Keyword: "k",
    token.Operator.Word: "k",
    token.String: "s",
    token.Comment: "t",
    token.Number: "u",
    token.Name.Function: "d",
    token.Name.Class: "d",
    token.Name.Builtin: "b",
    token.Name.Variable.Magic: "b",
}


@dataclass(frozen=True)
class Line:
    """A line of one side: its number and sign, its text, and the class that indents what is wrapped of it."""

    number: int
    sign: str
    text: Markup
    indent: str
    element: str


@dataclass(frozen=True)
class Row:
    """A line beside another one; ``kind`` is that of the pair."""

    kind: Kind
    left: Line | None
    right: Line | None


@dataclass(frozen=True)
class Group:
    """Rows that stay together when the sides are stacked, below the notes on patches; None: on the slots."""

    notes: Sequence[Change | None]
    rows: list[Row]

    @property
    def same(self) -> bool:
        """Whether nothing changed in it."""
        return self.rows[0].kind is Kind.SAME


@dataclass(frozen=True)
class Part:
    """A table of the diff from one line to another; with a summary, one that is folded unless it is open."""

    first: str
    last: str
    groups: Sequence[Group]
    summary: str = ""
    open: bool = False


def coloured(lines: Sequence[str]) -> list[Markup]:
    """Return each line of a Python text as markup: keywords, strings, comments and numbers get a class."""
    shown: list[list[tuple[str, str]]] = [[]]
    for kind, value in PythonLexer(stripnl=False, ensurenl=False).get_tokens("\n".join(lines)):
        colour = next((colour for of, colour in _COLOURS.items() if kind in of), "")
        first, *others = value.split("\n")
        shown[-1].append((colour, first))
        shown += [[(colour, other)] for other in others]
    span = Markup('<span class="{}">{}</span>')
    return [
        Markup("").join(
            span.format(colour, text(words)) if colour and words else text(words)
            for colour, parts in groupby(line, lambda part: part[0])
            for words in ["".join(word for _, word in parts)]
        )
        for line in shown[: len(lines)]
    ]


def side_by_side(module: Module) -> Iterator[Part]:
    """Yield the diff of a module's two texts; unchanged parts are folded, and unfold without a script."""
    texts = split(module.original or ""), split(module.patched or "")
    colours = [coloured(lines) for lines in texts]
    line_pairs = pairs(*texts)
    notes = _placed(module, line_pairs)

    def number(pair: Pair) -> int:
        return (pair.left or 0) + 1 if pair.right is None else module.first + pair.right

    def line(pair: Pair, side: int) -> Line | None:
        at, sign = (pair.left, pair.right)[side], _SIGNS[pair.kind][side]
        if at is None:
            return None
        bare = texts[side][at]
        width = min(len(bare) - len(bare.lstrip()), _DEEPEST) // 4 * 4
        element = {"−": "del", "+": "ins"}.get(sign, "")  # noqa: RUF001
        indent = f" i{width}" if width else ""
        return Line(module.first + at if side else at + 1, sign, colours[side][at], indent, element)

    for run in runs(line_pairs):
        groups: list[Group] = []
        for pair in run.pairs:
            row = Row(pair.kind, line(pair, 0), line(pair, 1))
            above = notes.get(pair, ())
            if above or not groups or groups[-1].same is not (pair.kind is Kind.SAME):
                groups.append(Group(above, [row]))
            else:
                groups[-1].rows.append(row)
        first, last = number(run.pairs[0]), number(run.pairs[-1])
        if not run.folded:
            yield Part(str(first), str(last), groups)
            continue
        defined = (_DEFINITION.match(texts[0][pair.left]) for pair in run.pairs if pair.left is not None)
        names = [definition[1] for definition in defined if definition]
        said = f"{counted(len(run.pairs), 'unchanged line')}, {first}–{last}"  # noqa: RUF001 - a range
        said += f": {shortened(names, _NAMED)}" if names else ""
        # A note may belong to an unchanged line, if the patch only removed lines there.
        yield Part(str(first), str(last), groups, said, any(pair in notes for pair in run.pairs))


def _placed(module: Module, line_pairs: Sequence[Pair]) -> dict[Pair, list[Change | None]]:
    """The notes by the pair below them: the line itself, or the removed lines directly above it."""
    noted: dict[int, list[Change | None]] = {}
    if module.slots:
        noted[min(line for _, _, line in module.slots)] = [None]
    for change in module.changes:
        noted.setdefault(change.lines[0], []).append(change)
    placed: dict[Pair, list[Change | None]] = {}
    for line, notes in sorted(noted.items()):
        wanted = line - module.first
        at = next(
            (at for at, pair in enumerate(line_pairs) if pair.right is not None and pair.right >= wanted),
            len(line_pairs) - 1,
        )
        above = Kind.SAME, Kind.REMOVED
        while at > 0 and line_pairs[at].kind in above and line_pairs[at - 1].kind is Kind.REMOVED:
            at -= 1
        placed.setdefault(line_pairs[at], []).extend(notes)
    return placed
