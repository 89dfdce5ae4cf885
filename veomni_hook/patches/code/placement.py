"""Find where statements can be inserted: at a function's start, or before a statement."""

from __future__ import annotations

import ast
import io
import tokenize
from dataclasses import dataclass

from veomni_hook.patches.code.document import Document, FunctionNode, has_docstring
from veomni_hook.patches.code.edit import Edit
from veomni_hook.patches.code.walk import walk_ast

__all__ = ["Place", "at_start", "before", "logical_line", "statement_at"]


@dataclass(frozen=True, slots=True)
class Place:
    """A place for statements: they replace ``[start, end)`` (white space), between ``head`` and ``tail``.

    ``indent`` is the indentation of the statements. ``splits`` are further required edits, which move other
    code on the same line to its own line.
    """

    start: int
    end: int
    indent: str
    head: str = ""
    tail: str = "\n"
    splits: tuple[Edit, ...] = ()

    def comment(self, text: str) -> str:
        """The text to insert at `start` for a comment above the statements."""
        return f"  {text}" if self.head else f"{self.indent}{text}\n"

    def block(self, code: str) -> str:
        """The text for ``[start, end)``; ``code`` has the place's indentation and no final newline."""
        return f"{self.head}{code}{self.tail}"


def at_start(document: Document, function: FunctionNode) -> Place:
    """The place before the first statement after a function's docstring and the comments above it."""
    first = function.body[0]
    rest = function.body[1:] if has_docstring(function) else function.body
    if not document.is_inline(function):
        indent = document.indent(first)
        if rest:
            start = _above_comments(document, function, document.span(rest[0])[0])
            return Place(start, start, indent)
        start = document.body_start(function)
        if start == len(document.source) and not document.source.endswith(("\n", "\r")):
            return Place(start, start, indent, head="\n", tail="")
        return Place(start, start, indent)
    # `def f(): return x`, `def f(): "doc"; return x`: the code after the header gets its own lines.
    splits: list[Edit] = []
    indent = document.indent(first if document.begins_line(first) else function)
    if not document.begins_line(first):
        indent += "    "
        if rest[:1] != [first]:
            start = _gap_before(document, first)
            splits.append(Edit(start, document.start(first), f"{document.newline}{indent}"))
    if not rest:
        end = document.end(first)
        return Place(end, end, indent, head="\n", tail="", splits=tuple(splits))
    start = _gap_before(document, rest[0])
    return Place(start, document.start(rest[0]), indent, head="\n", tail=f"\n{indent}", splits=tuple(splits))


def before(document: Document, function: FunctionNode, statement: ast.stmt) -> Place | None:
    """The place before a statement of a function and the comments above it.

    None for a statement in the middle of a line and for an ``elif``.
    """
    start = document.span(statement)[0]
    if not document.begins_line(statement) or document.source.startswith("elif", start):
        return None
    line = _above_comments(document, function, start)
    return Place(line, line, document.indent(statement))


def statement_at(document: Document, root: ast.AST, offset: int) -> ast.AST:
    """The innermost statement in ``root`` that begins a line and covers that of ``offset``; else ``root``."""
    line = document.lineno(offset)
    best = root
    for node in walk_ast(root):
        if isinstance(node, ast.stmt) and document.begins_line(node):
            first, last = document.lineno(document.span(node)[0]), node.end_lineno or 0
            if first <= line <= last and document.span(node)[0] >= document.span(best)[0]:
                best = node
    return best


def logical_line(document: Document, offset: int) -> tuple[int, int]:
    """The range of the simple statement or header at ``offset``, in whole lines, without the last newline."""
    tops = (node for node in document.tree.body if document.span(node)[0] <= offset < document.end(node))
    top = next(tops, None)
    first = offset if top is None else document.start(statement_at(document, top, offset))
    start = document.line_start(first)
    rest = document.source[start : document.end(top) if top is not None else None]
    # newline=None: Python 3.12's tokenizer does not accept "\r" as the end of a line.
    read = io.StringIO(rest.lstrip(" \t\f"), newline=None).readline
    for token in tokenize.generate_tokens(read):
        if token.type in (tokenize.NEWLINE, tokenize.ENDMARKER):
            return start, document.line_end(document.offset(document.lineno(start) + token.start[0] - 1, 0))
    raise ValueError(f"no statement ends after line {document.lineno(start)}")


def _gap_before(document: Document, node: ast.AST) -> int:
    start = document.start(node)
    return len(document.source[:start].rstrip(" \t\f"))


def _above_comments(document: Document, function: FunctionNode, start: int) -> int:
    """Offset of the line of the statement at ``start``, or of the comment lines directly above it."""
    line = document.line_start(start)
    indent = document.source[line:start]
    number = document.lineno(line)
    # A line inside a string may look like a comment; `floor` is the last line of the code above.
    ends = (getattr(node, "end_lineno", 0) for node in walk_ast(function))
    floor = max((end for end in ends if end < number), default=0)
    while number - 1 > floor and document.source.startswith(
        f"{indent}#", above := document.line_start(line - 1)
    ):
        line, number = above, number - 1
    return line
