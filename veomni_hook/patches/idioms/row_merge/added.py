"""Rows that are added at a mask: a guard before the body of a method that does nothing else.

The method clones the hidden states, adds the source to the rows at the mask, and returns the clone.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.tree import bound_once, last_name, substituted, walk_ast
from veomni_hook.patches.graph import ARGUMENT, source
from veomni_hook.patches.idioms.row_merge.find import OP
from veomni_hook.patches.idioms.shared import formula_of, has_self
from veomni_hook.patches.routes.guards import ask, before_body
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Code, Missed, Site, Status, slot_name

__all__ = ["CANDIDATES", "OP", "PART", "WORDS", "find", "operands_of"]

PART = "addition"
WORDS = "mask"
CANDIDATES = (
    "every method and function that adds something to the elements of a tensor at an index whose text"
    " contains mask (part addition)"
)

_VARIANT = "rows_added"
_OPERANDS = ("hidden_states", "mask", "source")


def find(view: ModuleView) -> Iterator[Site]:
    """Every candidate of a module."""
    for target, owner, function in view.every_function():
        if "mask" not in view.text(function) or (sum_ := _sum(function)) is None:
            continue
        try:
            operands = _operands(view, owner, function)
        except Missed as missed:
            yield Site(OP, target, Status.MISSED, reason=missed.reason, part=PART, lineno=sum_.lineno)
            continue
        code = ask(function, slot_name(OP, _VARIANT), "self", operands)
        edits = before_body(view, function, code, f"{OP}/{_VARIANT}")
        captures = dict(zip(_OPERANDS, operands, strict=True))
        yield Site.asking(OP, target, _VARIANT, sum_, edits, captures=captures, part=PART)


def _operands(view: ModuleView, owner: ast.ClassDef | None, method: FunctionNode) -> list[str]:
    if owner is None:
        raise Missed("a function, which belongs to no module", code=Code.NO_OWNER)
    if not has_self(method):
        raise Missed("self is not the method's module", code=Code.REPLACED)
    try:
        return operands_of(view, owner, method)
    except Missed as missed:
        raise Missed(missed.reason.after("the method does not only add rows")) from None


def operands_of(view: ModuleView, owner: ast.ClassDef, method: FunctionNode) -> list[str]:
    """The hidden states, the mask and the rows of a method.

    Raises:
        Missed: it does not only add rows.
    """
    rules = dict.fromkeys(_OPERANDS, ARGUMENT)
    _, _, matched = formula_of(OP, view, owner, method, rules, names=(_VARIANT,))
    return [source(matched.bindings[name]) for name in _OPERANDS]


def _sum(function: FunctionNode) -> ast.stmt | ast.expr | None:
    """The first sum with elements at a mask."""
    values = bound_once(walk_ast(function))
    for node in walk_ast(function):
        if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add) and _at_mask(node.target):
            return node
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            if any(_at_mask(substituted(part, values)) for part in (node.left, node.right)):
                return node
    return None


def _at_mask(node: ast.expr) -> bool:
    return isinstance(node, ast.Subscript) and any("mask" in last_name(part) for part in walk_ast(node.slice))
