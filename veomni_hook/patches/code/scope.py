"""Find the names that code binds and uses; inserted code must not collide with them.

The results depend on the tree alone and are the same on every Python release (`symtable` changed its results
for comprehensions in 3.12).
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import lru_cache

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.walk import child_nodes, walk_ast

__all__ = [
    "bound_names",
    "local_names",
    "names_in",
    "nested_names",
    "own_names",
    "parameter_names",
    "used_names",
]

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
# The most frequent nodes that bind nothing.
_PLAIN = frozenset(
    {ast.Attribute, ast.Constant, ast.Call, ast.Expr, ast.Assign, ast.BinOp, ast.Subscript, ast.keyword}
)
# Cache size: readers and routes query the same few functions repeatedly. Trees never change, so entries stay
# valid.
_ASKED = 16
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def parameter_names(function: FunctionNode | ast.Lambda) -> set[str]:
    """Every parameter of a function, ``*args`` and ``**kwargs`` included."""
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return {argument.arg for argument in (*named, arguments.vararg, arguments.kwarg) if argument is not None}


@lru_cache(maxsize=_ASKED)
def local_names(function: FunctionNode) -> frozenset[str]:
    """Every name that is local to the function itself: parameters and what its own scope binds."""
    names = set(parameter_names(function))
    declared: set[str] = set()
    for node in _own_scope(function.body):
        names.update(_binds(node))
        if isinstance(node, ast.Global | ast.Nonlocal):
            declared.update(node.names)
    return frozenset(names - declared)


@lru_cache(maxsize=_ASKED)
def names_in(function: FunctionNode) -> frozenset[str]:
    """`used_names` of one function."""
    return frozenset(used_names([function]))


def bound_names(nodes: Iterable[ast.AST]) -> set[str]:
    """Every name that the code binds in any scope: comprehension variables and nested parameters too."""
    names: set[str] = set()
    for root in nodes:
        for node in walk_ast(root):
            names.update([node.arg] if isinstance(node, ast.arg) else _binds(node))
    return names


def own_names(statements: Iterable[ast.stmt]) -> set[str]:
    """Every name that statements bind in their own scope, including a walrus in a comprehension."""
    return {name for node in _own_scope(statements) for name in _binds(node)}


def nested_names(tree: ast.Module) -> set[str]:
    """Every name that the code binds in a scope inside it: comprehensions, lambdas, functions, classes."""
    names: set[str] = set()
    for node in walk_ast(tree):
        if isinstance(node, (*_FUNCTIONS, ast.Lambda, ast.ClassDef, *_COMPREHENSIONS)):
            names |= bound_names(child_nodes(node))
    return names


def used_names(nodes: Iterable[ast.AST]) -> set[str]:
    """Every name that the code reads or binds in any scope, without attributes and keywords."""
    names: set[str] = set()
    for root in nodes:
        for node in walk_ast(root):
            if isinstance(node, ast.Name):
                names.add(node.id)
            elif isinstance(node, ast.arg):
                names.add(node.arg)
            elif isinstance(node, ast.Global | ast.Nonlocal):
                names.update(node.names)
            else:
                names.update(_binds(node))
    return names


def _binds(node: ast.AST) -> Iterator[str]:
    if type(node) in _PLAIN:
        return
    if isinstance(node, ast.Name):
        if not isinstance(node.ctx, ast.Load):
            yield node.id
    elif isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
        yield node.name
    elif isinstance(node, ast.Import | ast.ImportFrom):
        for alias in node.names:
            yield alias.asname or alias.name.partition(".")[0]
    elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar):
        if node.name is not None:
            yield node.name
    elif isinstance(node, ast.MatchMapping) and node.rest is not None:
        yield node.rest


def _own_scope(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Every node of the scope, in no particular order.

    Nested scopes are yielded (a def binds its name) but not entered, except for parts that run outside them.
    """
    todo = list(nodes)
    while todo:
        node = todo.pop()
        yield node
        if isinstance(node, (*_FUNCTIONS, ast.Lambda)):
            arguments = node.args
            todo += [*arguments.defaults, *(value for value in arguments.kw_defaults if value is not None)]
            todo += getattr(node, "decorator_list", [])
        elif isinstance(node, ast.ClassDef):
            todo += [*node.bases, *(keyword.value for keyword in node.keywords), *node.decorator_list]
        elif isinstance(node, _COMPREHENSIONS):
            todo.append(node.generators[0].iter)
            # A walrus in a comprehension binds in the function around it.
            yield from (inner.target for inner in walk_ast(node) if isinstance(inner, ast.NamedExpr))
        else:
            todo += child_nodes(node)
