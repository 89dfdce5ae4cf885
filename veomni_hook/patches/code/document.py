"""A module's source text together with its syntax tree, addressed by character offsets.

The tree counts UTF-8 bytes per line, edits count characters in the whole text; only this file converts. It
never imports the module that it reads and never changes the text. As in Python's tokenizer, lines end only at
``\\n``, ``\\r\\n`` or ``\\r``; a form feed does not end a line.
"""

from __future__ import annotations

import ast
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias

from veomni_hook.patches.code.tree import DEFINITIONS, FUNCTIONS, chain, child_nodes

__all__ = [
    "ACCESSORS",
    "NEWLINE",
    "Definition",
    "DefinitionNode",
    "Document",
    "FunctionNode",
    "has_docstring",
    "is_docstring",
    "plain",
    "statements_of",
]

FunctionNode: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
DefinitionNode: TypeAlias = FunctionNode | ast.ClassDef | ast.Assign | ast.AnnAssign
NEWLINE = re.compile(r"\r\n|\r|\n")
# Blanks, brackets, joined lines and comments may be between the `@` and the expression.
_DECORATOR_HEAD = re.compile(r"@(?:[\s(\\]|#[^\r\n]*[\r\n])*")
_LINE_REST = re.compile(r"[ \t\f]*;?[ \t\f]*(?:#.*)?")
_Accessor: TypeAlias = Literal["", "setter", "deleter"]
ACCESSORS: tuple[_Accessor, ...] = ("setter", "deleter")


@dataclass(frozen=True, slots=True)
class Definition:
    """One definition in a module: a class, function or method, or a name assigned at module or class level.

    ``qualname`` is the name that a patch uses as its target: Python's own (with ``<locals>`` between a
    function and its inner definitions), plus ``.setter`` or ``.deleter`` for a property's other accessors.
    ``parents`` are the nodes around it, from the module inwards, including `if`, `try` and `with`.
    """

    qualname: str
    node: DefinitionNode
    parents: tuple[ast.AST, ...]
    kind: Literal["class", "function", "method", "assignment"]
    accessor: _Accessor = ""


class Document:
    """Source text and tree of one module.

    Args:
        source: the decoded text, without a byte order mark.
        module: the module's name, for messages.

    Raises:
        SyntaxError: the source is not valid Python.
    """

    def __init__(self, source: str, module: str = "<module>") -> None:
        self.source = source
        self.module = module
        self.tree = ast.parse(source, filename=module)
        self._line_starts = [0, *(match.end() for match in NEWLINE.finditer(source))]
        first = NEWLINE.search(source)
        self.newline = "\r\n" if first is not None and first.group() == "\r\n" else "\n"

    # Offsets

    def offset(self, line: int, column: int) -> int:
        """Character offset of a node's position: ``line`` from 1, ``column`` in UTF-8 bytes from 0."""
        start = self._line_starts[line - 1]
        text = self.source[start : self._line_starts[line] if line < len(self._line_starts) else None]
        return start + (column if text.isascii() else len(text.encode()[:column].decode()))

    def lineno(self, offset: int) -> int:
        """Number, from 1, of the line that contains ``offset``."""
        return bisect_right(self._line_starts, offset)

    def line_start(self, offset: int) -> int:
        """Offset of the first character of the line that contains ``offset``."""
        return self._line_starts[self.lineno(offset) - 1]

    def line_end(self, offset: int) -> int:
        """Offset after the last character of the line that contains ``offset``, before its newline."""
        newline = NEWLINE.search(self.source, offset)
        if newline is None:
            return len(self.source)
        # Between the two characters of a line ending, the line has already ended.
        return offset - 1 if self.source[offset - 1 : offset + 1] == "\r\n" else newline.start()

    def next_line(self, offset: int) -> int:
        """Offset of the line after the one that contains ``offset``; the end of the text if there is none."""
        line = self.lineno(offset)
        return self._line_starts[line] if line < len(self._line_starts) else len(self.source)

    def comments_above(self, offset: int) -> int:
        """Offset of the first of the comment lines directly above the line of ``offset``, or of this line."""
        start = self.line_start(offset)
        while start:
            above = self.line_start(start - 1)
            if not self.source[above:start].lstrip().startswith("#"):
                break
            start = above
        return start

    # Nodes

    def start(self, node: ast.AST) -> int:
        """Offset of the node's first character; for a decorated definition, of ``class`` or ``def``."""
        if isinstance(node, ast.Module):
            return 0
        line, column = _position(node, "lineno", "col_offset")
        return self.offset(line, column)

    def end(self, node: ast.AST) -> int:
        """Offset after the node's last character."""
        if isinstance(node, ast.Module):
            return len(self.source)
        line, column = _position(node, "end_lineno", "end_col_offset")
        return self.offset(line, column)

    def span(self, node: ast.AST) -> tuple[int, int]:
        """The node's range including its decorators, from the first ``@``."""
        decorators: list[ast.expr] = getattr(node, "decorator_list", [])
        if not decorators:
            return self.start(node), self.end(node)
        start = self.start(decorators[0])
        at = self.source.rfind("@", 0, start)
        while at >= 0 and _DECORATOR_HEAD.fullmatch(self.source, at, start) is None:
            at = self.source.rfind("@", 0, at)
        return (at if at >= 0 else start), self.end(node)

    def full_end(self, node: ast.AST) -> int:
        """Offset after everything that belongs to the node, before the newline.

        This includes a comment (or a final semicolon) in the node's last line. For a definition with its body
        on separate lines it also includes comment lines below it that are indented more than the definition.
        """
        end = self.end(node)
        line_end = self.line_end(end)
        if _LINE_REST.fullmatch(self.source, end, line_end) is None:
            return end
        end = line_end
        if not isinstance(node, DEFINITIONS):
            return end
        indent = len(self.indent(node).expandtabs())
        start = self.next_line(end)
        while start < len(self.source):
            line = self.source[start : self.line_end(start)]
            bare = line.lstrip(" \t\f")
            if bare and (bare[0] != "#" or len(line[: len(line) - len(bare)].expandtabs()) <= indent):
                break
            end = self.line_end(start) if bare else end
            start = self.next_line(start)
        return end

    def text(self, node: ast.AST) -> str:
        """The node's source text with its decorators, without the indentation of its first line."""
        start, end = self.span(node)
        return self.source[start:end]

    def indent(self, node: ast.AST) -> str:
        """White space at the beginning of the node's first line (decorators included).

        For a node that does not begin its line (``class A: pass``), it is the line's indentation.
        """
        begin = self.line_start(self.span(node)[0])
        line = self.source[begin : self.line_end(begin)]
        blank = line[: len(line) - len(line.lstrip(" \t\f"))]
        return blank[blank.rfind("\f") + 1 :]  # a form feed resets the column to zero

    def begins_line(self, node: ast.AST) -> bool:
        """Whether only white space precedes the node in its line."""
        start = self.span(node)[0]
        return not self.source[self.line_start(start) : start].strip(" \t\f")

    # Bodies

    def is_inline(self, node: FunctionNode | ast.ClassDef) -> bool:
        """Whether a statement block cannot be inserted into the body on its own line.

        True if the body is on the header's line (``def f(): return 1``), or if the first statement after the
        docstring is on the docstring's line (after a semicolon).
        """
        rest = statements_of(node)
        return not all(self.begins_line(statement) for statement in (*node.body[:1], *rest[:1]))

    # Definitions

    def definitions(self) -> list[Definition]:
        """Every definition in text order, nested ones after the definitions that contain them."""
        return list(self._definitions)

    def find(self, qualname: str) -> list[Definition]:
        """The definitions with this name (none, one or several); ``<locals>`` may be omitted."""
        return list(self._by_name.get(plain(qualname), ()))

    @cached_property
    def _definitions(self) -> tuple[Definition, ...]:
        return tuple(_walk(self.tree.body, "", (self.tree,), self.tree))

    @cached_property
    def _by_name(self) -> dict[str, list[Definition]]:
        by_name: dict[str, list[Definition]] = {}
        for definition in self._definitions:
            by_name.setdefault(plain(definition.qualname), []).append(definition)
        return by_name


def has_docstring(node: FunctionNode | ast.ClassDef | ast.Module) -> bool:
    """Whether the body begins with a docstring."""
    return bool(node.body) and is_docstring(node.body[0])


def statements_of(node: FunctionNode | ast.ClassDef) -> list[ast.stmt]:
    """The body without its docstring."""
    return node.body[has_docstring(node) :]


def is_docstring(statement: ast.stmt) -> bool:
    """Whether a statement is only a string."""
    constant = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(constant, ast.Constant) and isinstance(constant.value, str)


def _position(node: ast.AST, line: str, column: str) -> tuple[int, int]:
    try:
        return getattr(node, line), getattr(node, column)
    except AttributeError:
        raise ValueError(f"a {type(node).__name__} node has no position in the source") from None


def plain(qualname: str) -> str:
    """A qualified name without ``<locals>``, the form in which names are compared."""
    return qualname.replace("<locals>.", "")


def _assigned_names(node: ast.Assign | ast.AnnAssign) -> Iterator[str]:
    targets: list[ast.expr] = list(node.targets) if isinstance(node, ast.Assign) else [node.target]
    while targets:
        target = targets.pop(0)
        if isinstance(target, ast.Name):
            yield target.id
        elif isinstance(target, ast.Starred):
            targets.insert(0, target.value)
        elif isinstance(target, ast.Tuple | ast.List):
            targets[:0] = target.elts


def _walk(
    nodes: Iterable[ast.AST], prefix: str, parents: tuple[ast.AST, ...], scope: ast.AST
) -> Iterator[Definition]:
    for node in nodes:
        inside = (*parents, node)
        if isinstance(node, ast.ClassDef):
            yield Definition(prefix + node.name, node, parents, "class")
            yield from _walk(node.body, f"{prefix}{node.name}.", inside, node)
        elif isinstance(node, FUNCTIONS):
            in_class = isinstance(scope, ast.ClassDef)
            decorators = {chain(decorator) for decorator in node.decorator_list} if in_class else set()
            accessor: _Accessor = next((one for one in ACCESSORS if f"{node.name}.{one}" in decorators), "")
            name = f"{prefix}{node.name}" + (f".{accessor}" if accessor else "")
            yield Definition(name, node, parents, "method" if in_class else "function", accessor)
            yield from _walk(node.body, f"{name}.<locals>.", inside, node)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for name in _assigned_names(node) if not isinstance(scope, FUNCTIONS) else ():
                yield Definition(prefix + name, node, parents, "assignment")
        elif isinstance(node, ast.stmt | ast.excepthandler | ast.match_case):
            yield from _walk(child_nodes(node), prefix, inside, scope)
