"""The attributes that a class sets on its instances."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from veomni_hook.patches.code.walk import walk_ast

__all__ = ["initialised", "name_of_own", "statements_of_init"]


def statements_of_init(owner: ast.ClassDef) -> Iterator[ast.AST]:
    """Every node in the ``__init__`` that a class defines."""
    for method in owner.body:
        if isinstance(method, ast.FunctionDef) and method.name == "__init__":
            yield from walk_ast(method)


def initialised(owner: ast.ClassDef) -> Iterator[tuple[str, ast.expr]]:
    """The attributes of ``self`` that ``__init__`` assigns, in any block, with their values."""
    for node in statements_of_init(owner):
        for target in node.targets if isinstance(node, ast.Assign) else ():
            if isinstance(node, ast.Assign) and (name := name_of_own(target)):
                yield name, node.value


def name_of_own(node: ast.AST) -> str:
    """The attribute's name if a node is an attribute of ``self``, else an empty string."""
    owned = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    return node.attr if owned and isinstance(node, ast.Attribute) else ""
