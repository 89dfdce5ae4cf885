"""Insert an idiom's code into upstream's text: before statements, or in place of expressions.

Code is passed without indentation and gets that of its place; upstream's comments stay above it.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Sequence

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.placement import Place, at_start, before
from veomni_hook.patches.code.reindent import reindent
from veomni_hook.patches.code.scope import names_in
from veomni_hook.patches.report import one_line
from veomni_hook.patches.routes.site import Splice
from veomni_hook.patches.routes.view import ModuleView

__all__ = [
    "after_body",
    "as_lambda",
    "before_body",
    "before_statement",
    "decorate",
    "free_name",
    "in_place",
    "marker",
]

# Expressions that never need brackets, wherever they are inserted.
_ATOMS = (ast.Attribute, ast.Call, ast.Constant, ast.Dict, ast.List, ast.Name, ast.Set, ast.Subscript)


def before_body(view: ModuleView, function: FunctionNode, code: str, comment: str) -> tuple[Splice, ...]:
    """Insert statements before a function's body, after its docstring.

    A body on the same line as its ``def`` is moved to its own lines.
    """
    return _inserted(at_start(view.document, function), code, comment)


def after_body(view: ModuleView, function: FunctionNode, code: str, comment: str) -> tuple[Splice, ...]:
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
    return Splice(at, at, f"{indent}{marker(comment)}\n", marker=True), Splice(at, at, text)


def before_statement(
    view: ModuleView, function: FunctionNode, statement: ast.stmt, code: str, comment: str
) -> tuple[Splice, ...]:
    """Insert statements before a statement of ``function``, above the comments directly above it.

    Raises:
        ValueError: the statement does not begin its own line.
    """
    place = before(view.document, function, statement)
    if place is None:
        raise ValueError(f"line {statement.lineno} does not begin with the statement")
    return _inserted(place, code, comment)


def in_place(view: ModuleView, node: ast.expr, text: str) -> Splice:
    """Replace an expression with another, in brackets if precedence requires them.

    Raises:
        SyntaxError: ``text`` is not an expression.
    """
    given = ast.parse(text.strip(), mode="eval").body
    bracketed = (given.lineno, given.col_offset) != (1, 0)  # a node begins after the brackets around it
    if not bracketed and not isinstance(given, _ATOMS):
        text = f"({text.strip()})"
    return Splice(view.document.start(node), view.document.end(node), text)


def decorate(view: ModuleView, owner: ast.ClassDef, text: str, comment: str) -> tuple[Splice, ...]:
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
        Splice(line, line, f"{indent}{marker(comment)}\n", marker=True),
        Splice(line, line, f"{indent}@{text}\n"),
    )


def as_lambda(function: FunctionNode, values: Sequence[str]) -> str:
    """A lambda with the parameters of a function and a tuple of ``values``, which are code, as its result."""
    arguments = copy.deepcopy(function.args)
    for each in ast.walk(arguments):
        if isinstance(each, ast.arg):
            each.annotation = None
    body = ast.Tuple([ast.parse(value, mode="eval").body for value in values], ast.Load())
    return ast.unparse(ast.fix_missing_locations(ast.Lambda(arguments, body)))


def marker(comment: str) -> str:
    """The comment line that names a route in the patched text, without indentation and newline."""
    return "# " + one_line(f"[ROUTED] {comment}")


def free_name(function: FunctionNode, wanted: str) -> str:
    """``wanted``, or a similar name that the function does not use."""
    taken = names_in(function)
    name = wanted
    while name in taken:
        name = f"veomni_{name}"
    return name


def _inserted(place: Place, code: str, comment: str) -> tuple[Splice, ...]:
    block = place.block(reindent(code.strip("\n"), "", place.indent))
    return (
        *(Splice(start, end, text) for start, end, text in place.splits),
        Splice(place.start, place.start, place.comment(marker(comment)), marker=True),
        Splice(place.start, place.end, block),
    )
