"""Plain expressions: evaluating them twice, or earlier than in the source, gives the same result."""

from __future__ import annotations

import ast
import copy
from collections.abc import Mapping

from veomni_hook.patches.code.walk import child_nodes, walk_ast

__all__ = ["Unclear", "binding", "chain", "holds", "is_plain", "substituted"]

_PARTS = (
    ast.Name,
    ast.Attribute,
    ast.Constant,
    ast.Subscript,
    ast.Slice,
    ast.Tuple,
    ast.Compare,
    ast.BoolOp,
    ast.UnaryOp,
    ast.BinOp,
    ast.IfExp,
    ast.Call,
    ast.keyword,
    ast.expr_context,
    ast.operator,
    ast.cmpop,
    ast.boolop,
    ast.unaryop,
)
# Methods of tensors, configs and mappings without side effects.
_TENSOR_METHODS = {"contiguous", "float", "reshape", "size", "to", "type_as", "view"}
_METHODS = frozenset(_TENSOR_METHODS | {"get", "get_decoder", "get_text_config"})
_FUNCTIONS = frozenset({"getattr", "isinstance", "len"})


class Unclear(Exception):
    """Code that is not understood.

    Args:
        what: what is not understood.
        node: where.
    """

    def __init__(self, what: str, node: ast.AST) -> None:
        super().__init__(f"{what} (line {getattr(node, 'lineno', '?')})")


def chain(node: ast.AST) -> str:
    """``a.b[i].c`` as ``a.b.c``; empty if there is anything but names, attributes and plain indices."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute | ast.Subscript):
        if isinstance(node, ast.Attribute):
            parts.append(node.attr)
        elif not is_plain(node.slice):
            return ""
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def is_plain(node: ast.AST) -> bool:
    """Whether evaluating an expression has no side effects and costs almost nothing."""
    if not isinstance(node, _PARTS):
        return False
    if isinstance(node, ast.Call):
        function = node.func
        looks = isinstance(function, ast.Attribute) and function.attr in _METHODS
        if not looks and not (isinstance(function, ast.Name) and function.id in _FUNCTIONS):
            return False
    return all(is_plain(child) for child in child_nodes(node))


def substituted(node: ast.expr, values: Mapping[str, ast.expr]) -> ast.expr:
    """``node`` with names replaced by expressions; the same object if there is nothing to replace."""
    if not any(isinstance(inner, ast.Name) and inner.id in values for inner in walk_ast(node)):
        return node
    replaced: ast.expr = _Substitution(values).visit(copy.deepcopy(node))
    return replaced


def holds(statement: ast.AST, node: ast.AST) -> bool:
    """Whether ``node`` is ``statement`` or a part of it."""
    return any(inner is node for inner in walk_ast(statement))


def binding(statement: ast.stmt) -> tuple[str, ast.expr | None]:
    """The name that a statement binds, and the value; an empty name and None if it does anything else."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target: ast.expr = statement.targets[0]
    elif isinstance(statement, ast.AnnAssign):
        target = statement.target
    else:
        return "", None
    return (target.id, statement.value) if isinstance(target, ast.Name) and statement.value else ("", None)


class _Substitution(ast.NodeTransformer):
    def __init__(self, values: Mapping[str, ast.expr]) -> None:
        self._values = values

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self._values.get(node.id, node)
