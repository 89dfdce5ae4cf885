"""Wrap long lines of code inside their brackets; only the layout changes.

No name, operator or string changes, so the syntax tree stays the same. If items get separate lines, the last
one gets a trailing comma.
"""

from __future__ import annotations

import textwrap
import tokenize
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from veomni_hook.patches.code.edit import tokens

__all__ = ["WIDTH", "wrapped"]

#: Maximum width of the lines that this package writes in a patched module.
WIDTH = 120

_CLOSING = {"(": ")", "[": "]", "{": "}"}
# Shorter contents of brackets stay on their line: `x.transpose(1, 2)`.
_WORTH = 8
# Commas at the level of these words do not separate items.
_WHOLE = ("lambda", "for")
_BEFORE = ("and", "or", "if", "else", "for")


class _Token(NamedTuple):
    """A token and the blanks before it."""

    gap: str
    text: str


def wrapped(text: str, width: int = WIDTH) -> str:
    """Break lines of ``text`` that are longer than ``width``, inside brackets.

    A comment on its own line is folded; a comment after code moves above it.

    Args:
        text: whole lines of Python, at any indentation; a block may lack its body.
        width: the maximum width of a line.
    """
    lines = text.split("\n")
    if max(map(len, lines)) <= width:
        return text
    by_line = _by_line(text)
    folded: list[str] = []
    for number, line in enumerate(lines):
        line_tokens = by_line.get(number)
        if len(line) <= width or line_tokens is None or line.endswith("\\"):
            folded.append(line)
        else:
            indent = line[: len(line) - len(line.lstrip())]
            *code, last = line_tokens
            if last.text.startswith("#"):
                folded += textwrap.wrap(
                    last.text,
                    width,
                    initial_indent=indent,
                    subsequent_indent=f"{indent}#     ",
                    break_long_words=False,
                    break_on_hyphens=False,
                )
            else:
                code = line_tokens
            folded += _lines(code, indent, width) if code else ()
    return "\n".join(folded)


def _by_line(text: str) -> dict[int, list[_Token]]:
    """The tokens of every line, by line number from 0, without lines that contain part of a longer string."""
    by_line: dict[int, list[_Token]] = {}
    broken: set[int] = set()
    lines = text.split("\n")
    ends: dict[int, int] = {}
    for token in tokens(f"{text}\n"):
        (row, column), (last, end) = token.start, token.end
        row, last = row - 1, last - 1
        if token.type != tokenize.STRING and not token.string.strip():
            continue
        if row != last:
            broken.update(range(row, last + 1))
            continue
        begin = ends.get(row, 0)
        gap = lines[row][begin:column] if begin else ""
        by_line.setdefault(row, []).append(_Token(gap, lines[row][column:end]))
        ends[row] = end
    return {row: line for row, line in by_line.items() if row not in broken}


def _lines(tokens: Sequence[_Token], indent: str, width: int) -> list[str]:
    line = indent + _text(tokens)
    chosen = _group(tokens, indent, width) if len(line) > width else None
    if chosen is None:
        return [line]
    opening, closing = chosen
    inner = indent + ("\t" if indent.endswith("\t") else "    ")
    return [
        *_lines(tokens[: opening + 1], indent, width),
        *_inside(tokens[opening + 1 : closing], inner, width),
        *_lines(tokens[closing:], indent, width),
    ]


def _inside(tokens: Sequence[_Token], indent: str, width: int) -> list[str]:
    """The contents of brackets: on one line, or one line for each item, or split before operators."""
    if len(indent + _text(tokens)) <= width:
        return [indent + _text(tokens)]
    outer = [token.text for token, depth in _depths(tokens) if depth == 0]
    if "," in outer and not set(outer) & set(_WHOLE):
        items = _parted(tokens, after=(",",))
        if items[-1][-1].text != ",":
            items[-1] = [*items[-1], _Token("", ",")]
        return [line for item in items for line in _lines(item, indent, width)]
    parts = _parted(tokens, before=_BEFORE) if "lambda" not in outer else [[*tokens]]
    return [line for part in parts for line in _lines(part, indent, width)]


def _group(tokens: Sequence[_Token], indent: str, width: int) -> tuple[int, int] | None:
    """The brackets at which to break: the last pair with short lines around it, else the longest pair."""
    groups = [(start, end) for start, end in _groups(tokens) if end > start + 1]
    for start, end in reversed(groups):
        around = (tokens[: start + 1], tokens[end:])
        worth = tokens[start].text == "(" and len(_text(tokens[start + 1 : end])) >= _WORTH
        if worth and all(len(indent + _text(part)) <= width for part in around):
            return start, end
    return max(groups, key=lambda group: len(_text(tokens[group[0] + 1 : group[1]])), default=None)


def _groups(tokens: Sequence[_Token]) -> list[tuple[int, int]]:
    """The outermost pairs of brackets in a line, as indices of tokens."""
    opened: list[int] = []
    groups: list[tuple[int, int]] = []
    for place, token in enumerate(tokens):
        if token.text in _CLOSING:
            opened.append(place)
        elif token.text in _CLOSING.values() and opened:
            start = opened.pop()
            groups = [*(group for group in groups if group[0] < start), (start, place)]
    return groups


def _depths(tokens: Sequence[_Token]) -> Iterator[tuple[_Token, int]]:
    depth = 0
    for token in tokens:
        depth -= token.text in _CLOSING.values()
        yield token, depth
        depth += token.text in _CLOSING


def _parted(
    tokens: Sequence[_Token], *, after: Sequence[str] = (), before: Sequence[str] = ()
) -> list[list[_Token]]:
    """Split tokens ``after`` or ``before`` the given ones at the outermost level."""
    parts: list[list[_Token]] = [[]]
    for token, depth in _depths(tokens):
        if depth == 0 and token.text in before and parts[-1]:
            parts.append([])
        parts[-1].append(token)
        if depth == 0 and token.text in after:
            parts.append([])
    return parts if parts[-1] else parts[:-1]


def _text(tokens: Sequence[_Token]) -> str:
    return "".join(token.gap + token.text for token in tokens).lstrip()
