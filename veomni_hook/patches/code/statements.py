"""Statements: the blocks that contain them, and the names and attributes that they bind."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Iterator

from veomni_hook.patches.code.expressions import own_attribute
from veomni_hook.patches.code.walk import DEFINITIONS, walk_ast

__all__ = [
    "assigned",
    "binding",
    "blocks",
    "bound_once",
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
    """Every node in the ``__init__`` that a class defines, and in its methods that it calls."""
    methods = {method.name: method for method in owner.body if isinstance(method, ast.FunctionDef)}
    called = ["__init__"]
    for name in called:  # the list grows during the loop
        for node in walk_ast(methods[name]) if name in methods else ():
            yield node
            method = own_attribute(node.func) if isinstance(node, ast.Call) else ""
            if method and method not in called:
                called.append(method)


def bound_once(nodes: Iterable[ast.AST]) -> dict[str, ast.expr]:
    """The names that the nodes of a function bind once, to an expression, with it: what they stand for."""
    count: Counter[str] = Counter()
    bindings: list[tuple[str, ast.expr | None]] = []
    for node in nodes:
        if isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Store):
                count[node.id] += 1
        elif isinstance(node, ast.arg):
            count[node.arg] += 1
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            bindings.append(binding(node))
    return {name: value for name, value in bindings if value is not None and count[name] == 1}


def initialised(owner: ast.ClassDef) -> Iterator[tuple[str, ast.expr]]:
    """The attributes of ``self`` that `statements_of_init` assign, in any block, with their values."""
    return assigned(statements_of_init(owner))


def assigned(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, ast.expr]]:
    """The attributes of ``self`` that the nodes of a method assign, with their values, by no other name."""
    nodes = list(nodes)
    values = bound_once(nodes)
    for node in nodes:
        for target in node.targets if isinstance(node, ast.Assign) else ():
            if isinstance(node, ast.Assign) and (name := own_attribute(target)):
                yield name, values.get(getattr(node.value, "id", ""), node.value)
