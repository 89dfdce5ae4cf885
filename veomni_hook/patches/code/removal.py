"""Remove code from source text: statements, or items of a list such as imported names or ``__all__``."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Sequence

from veomni_hook.patches.code.document import Document
from veomni_hook.patches.code.edit import Edit

__all__ = ["remove_items", "remove_statement"]

_COMMA = re.compile(r"(?:\s|#[^\r\n]*(?:\r\n|\r|\n)|\\(?:\r\n|\r|\n))*,")
_REST = re.compile(r"[ \t\f]*,?[ \t\f]*(?:#.*)?")


def remove_items(
    document: Document, items: Sequence[ast.AST], dropped: Collection[int], *, lone_comma: bool = False
) -> Iterator[Edit]:
    """Yield the edits that remove items and keep the others with their comments.

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
        yield Edit(first, last, "")
        if comma:
            yield Edit(comma.end() - 1, comma.end(), "")
    elif one_line:
        texts = [document.source[document.start(items[n]) : document.end(items[n])] for n in kept]
        needs_comma = lone_comma and len(kept) == 1 and not _COMMA.match(document.source, last)
        yield Edit(first, last, ", ".join(texts) + ("," if needs_comma else ""))
    else:
        for number in sorted(dropped):
            yield from _removal(document, items, number, after_gap=number - 1 in dropped)
        end = document.end(items[kept[0]]) if kept else 0
        if lone_comma and len(kept) == 1 and not _COMMA.match(document.source, end):
            yield Edit(end, end, ",")


def _removal(document: Document, items: Sequence[ast.AST], number: int, *, after_gap: bool) -> Iterator[Edit]:
    source = document.source
    start, end = document.start(items[number]), document.end(items[number])
    line_start, line_end = document.line_start(start), document.line_end(end)
    comma = _COMMA.match(source, end)
    if comma and comma.end() > line_end:
        yield Edit(comma.end() - 1, comma.end(), "")
    if not source[line_start:start].strip() and _REST.fullmatch(source, end, line_end):
        yield Edit(line_start, document.next_line(end), "")
    elif comma and comma.end() <= line_end:
        end = comma.end()
        while source[end : end + 1] in (" ", "\t"):
            end += 1
        yield Edit(start, end, "")
    else:
        while not after_gap and source[start - 1 : start] in (" ", "\t"):
            start -= 1
        yield Edit(start, end, "")


def remove_statement(
    document: Document, statement: ast.stmt, *, needed: bool, attached: bool = False
) -> Edit:
    """The edit that removes a statement with its lines.

    Args:
        needed: the block would be empty: ``pass`` replaces the statement, as on lines with other code.
        attached: also remove the comment lines directly above it, and one of two gaps of blank lines.
    """
    source = document.source
    start, end = document.span(statement)[0], document.full_end(statement)
    if needed or not document.begins_line(statement) or end != document.line_end(end):
        return Edit(start, document.end(statement), "pass")
    start = document.comments_above(start) if attached else document.line_start(start)
    # From the end of the line above, so that insertions at the end of the last line stay possible.
    start = document.line_end(document.line_start(start - 1)) if start else 0
    if attached and not source[document.line_start(start) : start].strip():
        following = document.next_line(end)
        while following < len(source) and not source[following : document.line_end(following)].strip():
            end = document.line_end(following)
            following = document.next_line(following)
    return Edit(start, end, "")
