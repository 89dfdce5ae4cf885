"""The edits that insert an idiom's code into upstream's text: before statements, or in place of expressions.

Code is passed without indentation and gets that of its place; upstream's comments stay above it.
"""

from __future__ import annotations

import ast

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.edit import Edit, marker_comment
from veomni_hook.patches.code.placement import Place, at_start, before
from veomni_hook.patches.code.reindent import reindent
from veomni_hook.patches.code.scope import names_in
from veomni_hook.patches.routes.view import ModuleView

__all__ = [
    "after_body",
    "before_body",
    "before_statement",
    "decorate",
    "free_name",
    "in_place",
]

# Expressions that never need brackets, wherever they are inserted.
_ATOMS = (ast.Attribute, ast.Call, ast.Constant, ast.Dict, ast.List, ast.Name, ast.Set, ast.Subscript)


def before_body(view: ModuleView, function: FunctionNode, code: str, comment: str) -> tuple[Edit, ...]:
    """Insert statements before a function's body, after its docstring.

    A body on the same line as its ``def`` is moved to its own lines.
    """
    return _inserted(at_start(view.document, function), code, comment)


def after_body(view: ModuleView, function: FunctionNode, code: str, comment: str) -> tuple[Edit, ...]:
    """Insert statements at the end of a function's body; they run only if control reaches the end.

    Raises:
        ValueError: the last statement does not begin its own line.
    """
    document, last = view.document, function.body[-1]
    if not document.begins_line(last):
        raise ValueError(f"line {last.lineno} does not begin with the statement")
    indent = document.indent(last)
    at = document.next_line(document.end(last))
    text = "".join(f"{indent}{line}\n" if line else "\n" for line in code.splitlines())
    return Edit(at, at, f"{indent}{marker_comment('ROUTED', comment)}\n", marker=True), Edit(at, at, text)


def before_statement(
    view: ModuleView, function: FunctionNode, statement: ast.stmt, code: str, comment: str
) -> tuple[Edit, ...]:
    """Insert statements before a statement of ``function``, above the comments directly above it.

    Raises:
        ValueError: the statement does not begin its own line.
    """
    place = before(view.document, function, statement)
    if place is None:
        raise ValueError(f"line {statement.lineno} does not begin with the statement")
    return _inserted(place, code, comment)


def in_place(view: ModuleView, node: ast.expr, text: str) -> Edit:
    """Replace an expression with another, in brackets if precedence requires them.

    Raises:
        SyntaxError: ``text`` is not an expression.
    """
    given = ast.parse(text.strip(), mode="eval").body
    bracketed = (given.lineno, given.col_offset) != (1, 0)  # a node begins after the brackets around it
    if not bracketed and not isinstance(given, _ATOMS):
        text = f"({text.strip()})"
    return Edit(view.document.start(node), view.document.end(node), text)


def decorate(view: ModuleView, owner: ast.ClassDef, text: str, comment: str) -> tuple[Edit, ...]:
    """Insert a decorator above all others of a class; ``text`` is the expression, without ``@``.

    Raises:
        ValueError: the class does not begin a line.
    """
    document = view.document
    if not document.begins_line(owner):
        raise ValueError(f"line {owner.lineno} does not begin with the class")
    line = document.line_start(document.span(owner)[0])
    indent = document.indent(owner)
    return (
        Edit(line, line, f"{indent}{marker_comment('ROUTED', comment)}\n", marker=True),
        Edit(line, line, f"{indent}@{text}\n"),
    )


def free_name(function: FunctionNode, wanted: str) -> str:
    """``wanted``, or a similar name that the function does not use."""
    taken = names_in(function)
    name = wanted
    while name in taken:
        name = f"veomni_{name}"
    return name


def _inserted(place: Place, code: str, comment: str) -> tuple[Edit, ...]:
    block = place.block(reindent(code.strip("\n"), "", place.indent))
    return (
        *place.splits,
        Edit(place.start, place.start, place.comment(marker_comment("ROUTED", comment)), marker=True),
        Edit(place.start, place.end, block),
    )
