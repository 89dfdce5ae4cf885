"""Remove items from a comma-separated list in source text: imported names, the strings of ``__all__``."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Sequence

from veomni_hook.patches.code.document import Document

__all__ = ["remove_items"]

_COMMA = re.compile(r"(?:\s|#[^\r\n]*(?:\r\n|\r|\n)|\\(?:\r\n|\r|\n))*,")
_REST = re.compile(r"[ \t\f]*,?[ \t\f]*(?:#.*)?")


def remove_items(
    document: Document, items: Sequence[ast.AST], dropped: Collection[int], *, lone_comma: bool = False
) -> Iterator[tuple[int, int, str]]:
    """Yield ``(start, end, text)`` splices that remove items and keep the others with their comments.

    An item on its own line is removed with that line and its trailing comment.

    Args:
        items: all items of the list, in text order.
        dropped: indices of the items to remove.
        lone_comma: write a comma after a single remaining item, as a tuple requires.
    """
    kept = [number for number in range(len(items)) if number not in dropped]
    first, last = document.start(items[0]), document.end(items[-1])
    one_line = document.lineno(first) == document.lineno(last)
    if not kept and one_line:
        comma = _COMMA.match(document.source, last)
        yield first, last, ""
        if comma:
            yield comma.end() - 1, comma.end(), ""
    elif one_line:
        texts = [document.source[document.start(items[n]) : document.end(items[n])] for n in kept]
        needs_comma = lone_comma and len(kept) == 1 and not _COMMA.match(document.source, last)
        yield first, last, ", ".join(texts) + ("," if needs_comma else "")
    else:
        for number in sorted(dropped):
            yield from _removal(document, items, number, after_gap=number - 1 in dropped)
        if lone_comma and len(kept) == 1 and not _COMMA.match(document.source, document.end(items[kept[0]])):
            yield document.end(items[kept[0]]), document.end(items[kept[0]]), ","


def _removal(
    document: Document, items: Sequence[ast.AST], number: int, *, after_gap: bool
) -> Iterator[tuple[int, int, str]]:
    source = document.source
    start, end = document.start(items[number]), document.end(items[number])
    line_start, line_end = document.line_start(start), document.line_end(end)
    comma = _COMMA.match(source, end)
    if comma and comma.end() > line_end:
        yield comma.end() - 1, comma.end(), ""
    if not source[line_start:start].strip() and _REST.fullmatch(source, end, line_end):
        yield line_start, document.next_line(end), ""
    elif comma and comma.end() <= line_end:
        end = comma.end()
        while source[end : end + 1] in (" ", "\t"):
            end += 1
        yield start, end, ""
    else:
        while not after_gap and source[start - 1 : start] in (" ", "\t"):
            start -= 1
        yield start, end, ""
