"""Expressions: the names that they consist of, and whether they are plain.

Evaluating a plain expression twice, or earlier than in the source, gives the same result.
"""

from __future__ import annotations

import ast

from veomni_hook.patches.code.walk import child_nodes

__all__ = ["chain", "compared_with_none", "decorator_name", "is_plain", "last_name", "own_attribute"]

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


def last_name(node: ast.AST) -> str:
    """The last part of a name: ``c`` for ``a.b.c`` and for ``c``; empty for other expressions."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def compared_with_none(node: ast.AST, *operators: type[ast.cmpop]) -> ast.expr | None:
    """``x`` of ``x is None`` (``ast.Is``) or ``x is not None`` (``ast.IsNot``); None for other code."""
    match node:
        case (
            ast.Compare(left=left, ops=[operator], comparators=[ast.Constant(value=None)])
            | ast.Compare(left=ast.Constant(value=None), ops=[operator], comparators=[left])
        ):
            return left if isinstance(operator, operators) else None
    return None


def decorator_name(decorator: ast.expr) -> str:
    """The last name of a decorator, whether it is called or not."""
    while isinstance(decorator, ast.Call):
        decorator = decorator.func
    return last_name(decorator)


def own_attribute(node: ast.AST) -> str:
    """The attribute's name if a node is an attribute of ``self``, else an empty string."""
    owned = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    return node.attr if owned and isinstance(node, ast.Attribute) else ""


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
