"""Python source as markup, line by line: keywords, strings, comments and numbers get a class."""

from __future__ import annotations

import builtins
import io
import keyword
import tokenize
from collections.abc import Iterator, Sequence

from veomni_hook.tools.report.html import Html, join, tag, text

__all__ = ["coloured"]

_KINDS = {tokenize.STRING: "s", tokenize.COMMENT: "t", tokenize.NUMBER: "u"}
# From Python 3.12 on an f-string is several tokens; its parts are strings.
_KINDS |= {
    getattr(tokenize, name): "s"
    for name in ("FSTRING_START", "FSTRING_MIDDLE", "FSTRING_END")
    if hasattr(tokenize, name)
}
_NAMES = frozenset({"self", "cls"})

Span = tuple[int, int, str]


def coloured(lines: Sequence[str]) -> list[Html]:
    """Return each line as markup.

    Text that Python cannot tokenize gets no colours; it is only shown, so this is not an error.
    """
    spans: dict[int, list[Span]] = {}
    try:
        for row, span in _spans(lines):
            spans.setdefault(row, []).append(span)
    except (tokenize.TokenError, SyntaxError):
        spans = {}
    return [_line(line, spans.get(row, ())) for row, line in enumerate(lines)]


def _spans(lines: Sequence[str]) -> Iterator[tuple[int, Span]]:
    """The coloured parts of lines, each with its line number from 0."""
    after = ""
    for token in tokenize.generate_tokens(io.StringIO("".join(f"{line}\n" for line in lines)).readline):
        kind = _KINDS.get(token.type) or (
            _kind_of(token.string, after) if token.type == tokenize.NAME else ""
        )
        if token.type != tokenize.COMMENT:
            after = token.string
        if kind:
            (row, start), (last, end) = token.start, token.end
            for at in range(row, last + 1):
                first = start if at == row else 0
                yield at - 1, (first, end if at == last else len(lines[at - 1]), kind)


def _kind_of(name: str, after: str) -> str:
    if keyword.iskeyword(name):
        return "k"
    if after in ("def", "class"):
        return "d"
    if after == ".":
        return ""
    return "b" if name in _NAMES or hasattr(builtins, name) else ""


def _line(line: str, spans: Sequence[Span]) -> Html:
    parts: list[Html] = []
    at = 0
    for start, end, kind in spans:
        parts += [text(line[at:start]), tag("span", line[start:end], class_=kind)]
        at = end
    return join([*parts, text(line[at:])])
