"""Statements of a module as blocks of lines: find blocks, remove statements, place imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from veomni_hook.patches.code.document import Document

__all__ = ["blocks", "import_anchor", "module_statements", "removal"]

_PLACES = (ast.If, ast.Try, ast.With, ast.For, ast.While, ast.Match, ast.ExceptHandler, ast.match_case)
_BLOCKS = ("body", "orelse", "finalbody")


def blocks(tree: ast.Module) -> Iterator[list[ast.stmt]]:
    """Every list of statements that runs when the module is imported, outside classes and functions."""
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop(0)
        for name in _BLOCKS:
            statements = getattr(node, name, None)
            if statements:
                yield statements
                pending += [child for child in statements if isinstance(child, _PLACES)]
        pending += getattr(node, "handlers", [])
        pending += getattr(node, "cases", [])


def module_statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """Every statement of `blocks`."""
    return (statement for block in blocks(tree) for statement in block)


def removal(
    document: Document, statement: ast.stmt, *, needed: bool, attached: bool = False
) -> tuple[int, int, str]:
    """The splice ``(start, end, text)`` that removes a statement with its lines.

    Args:
        needed: the block would be empty: ``pass`` replaces the statement, as on lines with other code.
        attached: also remove the comment lines directly above it, and one of two gaps of blank lines.
    """
    source = document.source
    start, end = document.span(statement)[0], document.full_end(statement)
    if needed or not document.begins_line(statement) or end != document.line_end(end):
        return start, document.end(statement), "pass"
    start = document.line_start(start)
    while attached and start:
        above = document.line_start(start - 1)
        if not source[above:start].lstrip().startswith("#"):
            break
        start = above
    # From the end of the line above, so that insertions at the end of the last line stay possible.
    start = document.line_end(document.line_start(start - 1)) if start else 0
    if attached and not source[document.line_start(start) : start].strip():
        following = document.next_line(end)
        while following < len(source) and not source[following : document.line_end(following)].strip():
            end = document.line_end(following)
            following = document.next_line(following)
    return start, end, ""


def import_anchor(document: Document, *, future: bool = False) -> int:
    """Offset of the end of the line after which imports are added; -1 to add them before the first line.

    That is the last import before the first class or function (including one in an ``if`` or ``try``), or
    else the module's docstring; with ``future``, the docstring and ``__future__`` imports.
    """
    body = document.tree.body
    last: int | None = None
    for number, statement in enumerate(body):
        if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            break
        is_docstring = number == 0 and ast.get_docstring(document.tree, clean=False) is not None
        is_future = isinstance(statement, ast.ImportFrom) and statement.module == "__future__"
        if is_docstring or is_future or (not future and _imports(statement)):
            last = number
    if last is None:
        return -1
    # Statements on the same line stay together.
    while last + 1 < len(body) and not document.begins_line(body[last + 1]):
        last += 1
    return document.line_end(document.end(body[last]))


def _imports(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return True
    if not isinstance(statement, _PLACES):
        return False
    wrapped = ast.Module(body=[statement], type_ignores=[])
    return any(isinstance(inner, ast.Import | ast.ImportFrom) for inner in module_statements(wrapped))
