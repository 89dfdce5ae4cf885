"""Edits of source text, where they go and how they are indented: the only way in which code is changed.

An edit is a range of character offsets and a replacement text, so everything outside the ranges stays
unchanged, byte for byte.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from veomni_hook.patches.code.document import Document, FunctionNode, statements_of
from veomni_hook.patches.code.tree import walk_ast

__all__ = [
    "FUSED",
    "PLAIN",
    "Edit",
    "Place",
    "Placed",
    "apply_edits",
    "at_start",
    "before",
    "before_blanks",
    "edited",
    "logical_line",
    "marker_comment",
    "one_line",
    "place_edits",
    "reindent",
    "remove_items",
    "remove_statement",
    "statement_at",
    "string_lines",
    "tokens",
]

PLAIN, FUSED = "plain", "fused"

_DECORATOR = re.compile(r"@(?=\w)")


@dataclass(frozen=True, slots=True)
class Edit:
    """Replace ``source[start:end]`` by ``text``; ``start == end`` inserts, an empty text deletes.

    Attributes:
        start: offset of the first character.
        end: offset after the last character.
        text: the replacement.
        patch: index of the applied patch that the edit belongs to; -1 if none.
        also: indices of further patches that it carries out.
        marker: the edit only adds comments, which the text for ``diff`` omits.
        fuses: nothing is replaced: the text is put before every line of the range, including lines that other
            edits insert, in a copy of the method that runs if this condition holds. Only routes write such
            edits; `routes.compose` turns them into others.
        form: the form of the method that the edit is for: `PLAIN` (upstream's), `FUSED` (the copy), or both.
    """

    start: int
    end: int
    text: str
    patch: int = -1
    also: frozenset[int] = frozenset()
    marker: bool = False
    fuses: str = ""
    form: str = ""

    @property
    def patches(self) -> frozenset[int]:
        """Every patch that the edit carries out."""
        return self.also | {self.patch}

    @property
    def inserts(self) -> bool:
        """Whether the edit only inserts."""
        return self.start == self.end


@dataclass(frozen=True, slots=True)
class Placed:
    """An edit and the range ``[start, end)`` of its text in the result."""

    edit: Edit
    start: int
    end: int


def place_edits(source: str, edits: Iterable[Edit], *, markers: bool = True) -> tuple[str, list[Placed]]:
    """Apply ``edits`` and return the text and the position of each edit in it, in text order.

    Insertions at one offset keep their given order and come before a replacement that starts there. With
    ``markers=False``, marker edits are skipped.

    Raises:
        ValueError: a range is outside the source, or two edits overlap.
    """
    chosen = sorted(
        (edit for edit in edits if markers or not edit.marker),
        key=lambda edit: (edit.start, not edit.inserts),
    )
    pieces: list[str] = []
    placed: list[Placed] = []
    position = length = 0
    for edit in chosen:
        if not 0 <= edit.start <= edit.end <= len(source):
            raise ValueError(
                f"edit [{edit.start}, {edit.end}) lies outside {len(source)} characters of source"
            )
        if edit.start < position:
            raise ValueError(f"edit [{edit.start}, {edit.end}) overlaps one that ends at {position}")
        pieces.append(source[position : edit.start])
        pieces.append(edit.text)
        length += edit.start - position
        placed.append(Placed(edit, length, length + len(edit.text)))
        length += len(edit.text)
        position = edit.end
    pieces.append(source[position:])
    return "".join(pieces), placed


def apply_edits(source: str, edits: Iterable[Edit], *, markers: bool = True) -> str:
    """Return ``source`` with ``edits`` applied; see `place_edits` for order, ``markers`` and errors."""
    return place_edits(source, edits, markers=markers)[0]


def edited(source: str, start: int, end: int, edits: Iterable[Edit]) -> str:
    """Return ``source[start:end]`` with ``edits``, which are inside it, applied."""
    moved = [replace(edit, start=edit.start - start, end=edit.end - start) for edit in edits]
    return apply_edits(source[start:end], moved)


def marker_comment(label: str, text: str) -> str:
    """The comment ``# [LABEL] text`` that marks an edit in the patched text, without a newline."""
    return "# " + one_line(f"[{label}] {text}")


def one_line(text: str) -> str:
    """Return ``text`` as one comment line.

    Collapses white space and removes the ``@`` of decorators: transformers searches a module's source for the
    text ``@use_experts_implementation``, and a comment must not match.
    """
    return _DECORATOR.sub("", " ".join("".join(c if c.isprintable() else " " for c in text).split()))


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
    rest = statements_of(function)
    if not document.is_inline(function):
        indent = document.indent(first)
        if rest:
            start = _above_comments(document, function, document.span(rest[0])[0])
            return Place(start, start, indent)
        start = document.next_line(document.end(first))
        if start == len(document.source) and not document.source.endswith(("\n", "\r")):
            return Place(start, start, indent, head="\n", tail="")
        return Place(start, start, indent)
    # `def f(): return x`, `def f(): "doc"; return x`: the code after the header gets its own lines.
    splits: list[Edit] = []
    indent = document.indent(first if document.begins_line(first) else function)
    if not document.begins_line(first):
        indent += "    "
        if rest[:1] != [first]:
            start = before_blanks(document, document.start(first))
            splits.append(Edit(start, document.start(first), f"\n{indent}"))
    if not rest:
        end = document.end(first)
        return Place(end, end, indent, head="\n", tail="", splits=tuple(splits))
    start = before_blanks(document, document.start(rest[0]))
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


def before_blanks(document: Document, offset: int) -> int:
    """Offset of the blanks directly before ``offset`` in its line, or ``offset`` if there are none."""
    return len(document.source[:offset].rstrip(" \t\f"))


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


def string_lines(text: str) -> set[int]:
    """Numbers, from 1, of the lines that begin inside a string, including replacement fields of f-strings.

    Args:
        text: valid Python at the indentation of its first line.
    """
    strings = (token for token in tokens(text) if token.type == tokenize.STRING)
    return {line for token in strings for line in range(token.start[0] + 1, token.end[0] + 1)}


def tokens(text: str) -> Iterator[tokenize.TokenInfo]:
    """The tokens of a text at any indentation; an f-string is one token on every release, as a string is."""
    opened: list[tokenize.TokenInfo] = []
    # The tokenizer accepts an indented first line only after a header.
    for read in tokenize.generate_tokens(io.StringIO(f"if 1:\n{text}").readline):
        (row, column), (last, end) = read.start, read.end
        token = read._replace(start=(row - 1, column), end=(last - 1, end))
        kind = tokenize.tok_name[token.type]
        if kind.endswith("STRING_START"):
            opened.append(token)
        elif kind.endswith("STRING_END"):
            first = opened.pop()
            if not opened:
                yield tokenize.TokenInfo(tokenize.STRING, "", first.start, token.end, first.line)
        elif not opened and row > 1:
            yield token


def reindent(text: str, old: str, new: str) -> str:
    """Replace the indentation ``old`` by ``new`` in every line of ``text`` that is not inside a string.

    The first line counts as indented by ``old`` even if its indentation is missing. Lines that are indented
    less (comments, code in brackets) get the indentation ``new``; blank lines become empty. Line endings
    become ``\\n``.
    """
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    if not lines[0].startswith(old):
        lines[0] = old + lines[0].lstrip(" \t\f")
    inside = string_lines("\n".join(lines))  # they must not change
    moved = []
    for number, line in enumerate(lines, start=1):
        if number in inside:
            moved.append(line)
            continue
        bare = line.lstrip(" \t\f")
        # A form feed resets the column to zero.
        shown = line[line.rfind("\f", 0, len(line) - len(bare)) + 1 :]
        if not bare.strip():
            moved.append("")
        else:
            moved.append(new + (shown[len(old) :] if shown.startswith(old) else bare))
    return "\n".join(moved)


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
