"""Statements: the blocks that contain them, and the names and attributes that they bind."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from veomni_hook.patches.code.expressions import own_attribute
from veomni_hook.patches.code.walk import DEFINITIONS, walk_ast

__all__ = [
    "binding",
    "blocks",
    "initialised",
    "module_statements",
    "statements_of_init",
]

_BLOCKS = ("body", "orelse", "finalbody")


def blocks(root: ast.AST, *, nested: bool = False) -> Iterator[list[ast.stmt]]:
    """Every list of statements in a module, function or class, outer ones first.

    Args:
        root: the module, function or class.
        nested: also those of functions and classes inside it.
    """
    pending: list[ast.AST] = [root]
    for node in pending:  # the list grows during the loop
        for name in _BLOCKS:
            if statements := getattr(node, name, None):
                yield statements
                pending += [each for each in statements if nested or not isinstance(each, DEFINITIONS)]
        pending += getattr(node, "handlers", ())
        pending += getattr(node, "cases", ())


def module_statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """Every statement that runs when the module is imported, outside classes and functions."""
    return (statement for block in blocks(tree) for statement in block)


def binding(statement: ast.stmt) -> tuple[str, ast.expr | None]:
    """The name that a statement binds, and the value; an empty name and None if it does anything else."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target: ast.expr = statement.targets[0]
    elif isinstance(statement, ast.AnnAssign):
        target = statement.target
    else:
        return "", None
    return (target.id, statement.value) if isinstance(target, ast.Name) and statement.value else ("", None)


def statements_of_init(owner: ast.ClassDef) -> Iterator[ast.AST]:
    """Every node in the ``__init__`` that a class defines."""
    for method in owner.body:
        if isinstance(method, ast.FunctionDef) and method.name == "__init__":
            yield from walk_ast(method)


def initialised(owner: ast.ClassDef) -> Iterator[tuple[str, ast.expr]]:
    """The attributes of ``self`` that ``__init__`` assigns, in any block, with their values."""
    for node in statements_of_init(owner):
        for target in node.targets if isinstance(node, ast.Assign) else ():
            if isinstance(node, ast.Assign) and (name := own_attribute(target)):
                yield name, node.value
