"""Rows that are added at a mask: a guard before the body of a method that does nothing else.

The method clones the hidden states, adds the source to the rows at the mask, and returns the clone.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.tree import bound_once, last_name, substituted, walk_ast
from veomni_hook.patches.graph import ARGUMENT, Difference, Form, canonical, recognised, source
from veomni_hook.patches.idioms.add_rms_norm import has_self
from veomni_hook.patches.idioms.row_merge.find import OP
from veomni_hook.patches.routes.guards import ask, before_body
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Code, Reason, Site, Status, slot_name
from veomni_hook.patterns import pattern_file

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
        if "mask" in view.text(function) and (sum_ := _sum(function)) is not None:
            operands = _operands(view, owner, function)
            if isinstance(operands, Reason):
                yield Site(OP, target, Status.MISSED, reason=operands, part=PART, lineno=sum_.lineno)
                continue
            code = ask(function, slot_name(OP, _VARIANT), "self", operands)
            edits = before_body(view, function, code, f"{OP}/{_VARIANT}")
            captures = dict(zip(_OPERANDS, operands, strict=True))
            yield Site.asking(OP, target, _VARIANT, sum_, edits, captures=captures, part=PART)


def _operands(view: ModuleView, owner: ast.ClassDef | None, method: FunctionNode) -> list[str] | Reason:
    """What `operands_of` a method are, or why it is not routed."""
    if owner is None:
        return Reason("a function, which belongs to no module", Code.NO_OWNER)
    if not has_self(method):
        return Reason("self is not the method's module", Code.REPLACED)
    operands = operands_of(view, owner, method)
    return operands.after("the method does not only add rows") if isinstance(operands, Reason) else operands


def operands_of(view: ModuleView, owner: ast.ClassDef, method: FunctionNode) -> list[str] | Reason:
    """The hidden states, the mask and the rows of a method that only adds rows, or why it is none."""
    rules = dict.fromkeys(_OPERANDS, ARGUMENT)
    form = canonical(method, view.scope, owner)
    outcome = recognised(pattern_file(OP), form, rules, names=(_VARIANT,))
    if isinstance(outcome, Difference):
        return outcome.why if isinstance(form, Form) else form
    return [source(outcome[1].bindings[name]) for name in _OPERANDS]


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
