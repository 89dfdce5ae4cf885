"""How to walk and look at a syntax tree: nodes, expressions, statements, and changed copies.

Walking is fast, because recognisers read whole modules at import time. Evaluating a plain expression
twice, or earlier than in the source, gives the same result.
"""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeVar

__all__ = [
    "COMPREHENSIONS",
    "DEFINITIONS",
    "FUNCTIONS",
    "assigned",
    "binding",
    "blocks",
    "bound_once",
    "called_attributes",
    "calls_in",
    "chain",
    "child_nodes",
    "compared_with_none",
    "contains",
    "decorator_name",
    "forget_walks",
    "header",
    "in_text_order",
    "initialised",
    "is_plain",
    "last_name",
    "methods_of",
    "module_statements",
    "own_attribute",
    "statements_of_init",
    "substituted",
    "swapped",
    "walk_ast",
    "without_annotations",
]

_Placed = TypeVar("_Placed", bound=ast.expr | ast.stmt)

#: For `isinstance`: a tuple takes half the time of a union of types.
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DEFINITIONS = (*FUNCTIONS, ast.ClassDef)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
# Idioms walk these again and again. They do not change once they are walked; expressions that are made may.
_WHOLE = (*DEFINITIONS, ast.Module)

# The fields to visit of frequent nodes; other nodes are visited completely. Contexts and operators are
# skipped: they are a third of all nodes, and code reads them at the node that has them.
_FIELDS: dict[type[ast.AST], tuple[str, ...]] = {
    ast.Attribute: ("value",),
    ast.AugAssign: ("target", "value"),
    ast.BinOp: ("left", "right"),
    ast.BoolOp: ("values",),
    ast.Compare: ("left", "comparators"),
    ast.Constant: (),
    ast.List: ("elts",),
    ast.Name: (),
    ast.Starred: ("value",),
    ast.Subscript: ("value", "slice"),
    ast.Tuple: ("elts",),
    ast.UnaryOp: ("operand",),
    ast.arg: ("annotation",),
    ast.keyword: ("value",),
}


def child_nodes(node: ast.AST) -> list[ast.AST]:
    """The direct children of a node in the order of its fields, without contexts and operators."""
    children: list[ast.AST] = []
    for name in _FIELDS.get(type(node), node._fields):
        value = getattr(node, name, None)
        if type(value) is list:
            children += [item for item in value if isinstance(item, ast.AST)]
        elif isinstance(value, ast.AST):
            children.append(value)
    return children


def walk_ast(root: ast.AST) -> Iterator[ast.AST]:
    """A node and all its descendants, level by level like `ast.walk`, without contexts and operators."""
    return iter(_walked(root)) if isinstance(root, _WHOLE) else _walk(root)


def forget_walks() -> None:
    """Let go of the trees that `walk_ast` has kept."""
    _walked.cache_clear()


@lru_cache(maxsize=512)
def _walked(root: ast.AST) -> list[ast.AST]:
    return list(_walk(root))


def _walk(root: ast.AST) -> Iterator[ast.AST]:
    nodes = [root]
    for node in nodes:  # the list grows during the loop
        yield node
        # `child_nodes` inlined: calling it takes longer (1.7 instead of 1.3 ms for 700 lines).
        for name in _FIELDS.get(type(node), node._fields):
            value = getattr(node, name, None)
            if type(value) is list:
                nodes += [item for item in value if isinstance(item, ast.AST)]
            elif isinstance(value, ast.AST):
                nodes.append(value)


def calls_in(root: ast.AST) -> Iterator[ast.Call]:
    """The calls in a node, level by level."""
    return (node for node in walk_ast(root) if isinstance(node, ast.Call))


def called_attributes(root: ast.AST) -> Iterator[str]:
    """The last names of all called attributes: ``mean`` of ``x.mean()``."""
    return (call.func.attr for call in calls_in(root) if isinstance(call.func, ast.Attribute))


def in_text_order(nodes: Iterable[_Placed]) -> list[_Placed]:
    """Nodes in the order in which the source has their first characters."""
    return sorted(nodes, key=lambda node: (node.lineno, node.col_offset))


def contains(root: ast.AST, node: ast.AST) -> bool:
    """Whether ``node`` is ``root`` or a part of it."""
    return any(inner is node for inner in walk_ast(root))


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
_METHODS = frozenset("contiguous float reshape size to type_as view get get_decoder get_text_config".split())
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
    if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "self":
        return node.attr
    return ""


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
                pending += [
                    statement for statement in statements if nested or not isinstance(statement, DEFINITIONS)
                ]
        pending += getattr(node, "handlers", ())
        pending += getattr(node, "cases", ())


def module_statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """Every statement that runs when the module is imported, outside classes and functions."""
    return (statement for block in blocks(tree) for statement in block)


def header(statement: ast.stmt) -> Iterator[ast.AST]:
    """The nodes of a statement, without those of nested statements."""
    pending: list[ast.AST] = [statement]
    while pending:
        for child in child_nodes(pending.pop()):
            if isinstance(child, ast.expr | ast.pattern):
                yield from walk_ast(child)
            elif isinstance(child, ast.withitem | ast.match_case | ast.ExceptHandler):
                yield child
                pending.append(child)


def binding(statement: ast.stmt) -> tuple[str, ast.expr | None]:
    """The name that a statement binds, and the value; an empty name and None if it does anything else."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target: ast.expr = statement.targets[0]
    elif isinstance(statement, ast.AnnAssign):
        target = statement.target
    else:
        return "", None
    return (target.id, statement.value) if isinstance(target, ast.Name) and statement.value else ("", None)


def methods_of(owner: ast.ClassDef) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    """The methods that the body of a class defines, by name; without inherited ones."""
    return {node.name: node for node in owner.body if isinstance(node, FUNCTIONS)}


def statements_of_init(owner: ast.ClassDef) -> Iterator[ast.AST]:
    """Every node in the ``__init__`` that a class defines, and in its methods that it calls."""
    methods = methods_of(owner)
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


def without_annotations(arguments: ast.arguments) -> ast.arguments:
    """A copy of a function's parameters, without annotations."""
    copied = copy.deepcopy(arguments)
    for argument in walk_ast(copied):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    return copied


def swapped(value: object, swaps: Mapping[int, Sequence[ast.AST]]) -> Any:
    """A copy of a tree (or of a field's value) with some nodes replaced.

    Args:
        swaps: ``id`` of a node to its replacement; in a list it may be several nodes or none.
    """
    if isinstance(value, list):
        kept = (swaps[id(item)] if id(item) in swaps else (swapped(item, swaps),) for item in value)
        return [new for news in kept for new in news]
    if not isinstance(value, ast.AST):
        return value
    if id(value) in swaps:
        return swaps[id(value)][0]
    return type(value)(**{name: swapped(getattr(value, name, None), swaps) for name in value._fields})


def substituted(node: ast.expr, values: Mapping[str, ast.expr]) -> ast.expr:
    """``node`` with names that it reads replaced by expressions; itself if there is nothing to replace."""
    names = (inner for inner in walk_ast(node) if isinstance(inner, ast.Name) and inner.id in values)
    swaps = {id(name): (values[name.id],) for name in names if isinstance(name.ctx, ast.Load)}
    result: ast.expr = swapped(node, swaps) if swaps else node
    return result
