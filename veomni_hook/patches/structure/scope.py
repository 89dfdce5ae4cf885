"""Which names a piece of code binds and uses: what inserted code may not touch.

Pure questions to the tree, answered the same on every Python release (`symtable` changed its answer for
comprehensions in 3.12).
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from veomni_hook.patches.text.document import FunctionNode

__all__ = ["bound_names", "local_names", "nested_names", "parameter_names", "used_names"]

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def parameter_names(function: FunctionNode | ast.Lambda) -> set[str]:
    """Every parameter of a function, ``*args`` and ``**kwargs`` included."""
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return {argument.arg for argument in (*named, arguments.vararg, arguments.kwarg) if argument is not None}


def local_names(function: FunctionNode) -> set[str]:
    """Every name that is local to the function itself: parameters and what its own scope binds."""
    names = set(parameter_names(function))
    declared: set[str] = set()
    for node in _own_scope(function.body):
        names.update(_binds(node))
        if isinstance(node, ast.Global | ast.Nonlocal):
            declared.update(node.names)
    return names - declared


def bound_names(nodes: Iterable[ast.AST]) -> set[str]:
    """Every name that the code binds in any scope: comprehension variables and nested parameters too."""
    names: set[str] = set()
    for root in nodes:
        for node in _walk(root):
            names.update([node.arg] if isinstance(node, ast.arg) else _binds(node))
    return names


def nested_names(tree: ast.Module) -> set[str]:
    """Every name that the code binds in a scope inside it: comprehensions, lambdas, functions, classes."""
    names: set[str] = set()
    for node in _walk(tree):
        if isinstance(node, (*_FUNCTIONS, ast.Lambda, ast.ClassDef, *_COMPREHENSIONS)):
            names |= bound_names(ast.iter_child_nodes(node))
    return names


def used_names(nodes: Iterable[ast.AST]) -> set[str]:
    """Every name that the code reads or binds in any scope; attributes and keywords are no names."""
    names: set[str] = set()
    for root in nodes:
        for node in _walk(root):
            if isinstance(node, ast.Name):
                names.add(node.id)
            elif isinstance(node, ast.arg):
                names.add(node.arg)
            elif isinstance(node, ast.Global | ast.Nonlocal):
                names.update(node.names)
            else:
                names.update(_binds(node))
    return names


def _walk(root: ast.AST) -> Iterator[ast.AST]:
    """`ast.walk` in no particular order and without contexts, which are a third of all nodes."""
    todo = [root]
    while todo:
        node = todo.pop()
        yield node
        for name in node._fields:
            value = getattr(node, name, None)
            if type(value) is list:
                todo += [item for item in value if isinstance(item, ast.AST)]
            elif isinstance(value, ast.AST) and name != "ctx":
                todo.append(value)


def _binds(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
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
    # Nested scopes are yielded (a def binds its name) but not entered, save for what runs outside them.
    for node in nodes:
        yield node
        if isinstance(node, (*_FUNCTIONS, ast.Lambda)):
            arguments = node.args
            outside = [*arguments.defaults, *(value for value in arguments.kw_defaults if value is not None)]
            yield from _own_scope([*outside, *getattr(node, "decorator_list", [])])
        elif isinstance(node, ast.ClassDef):
            keywords = [keyword.value for keyword in node.keywords]
            yield from _own_scope([*node.bases, *keywords, *node.decorator_list])
        elif isinstance(node, _COMPREHENSIONS):
            yield from _own_scope([node.generators[0].iter])
            # A walrus in a comprehension binds in the function around it.
            for inner in _walk(node):
                if isinstance(inner, ast.NamedExpr):
                    yield inner.target
        else:
            yield from _own_scope(ast.iter_child_nodes(node))
