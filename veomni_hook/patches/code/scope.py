"""Find the names that code binds and uses: in one function, in any scope, and as globals of the module.

Inserted code must not collide with them. The results depend on the tree alone and are the same on every
Python release (`symtable` changed its results for comprehensions in 3.12). Only what a module reads and
nothing defines, which raises a NameError when it runs, comes from `symtable`, as in the compiler; in a
module that uses ``import *`` or writes to ``globals()``, every name counts as provided there.
"""

from __future__ import annotations

import ast
import builtins
import symtable
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeGuard

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.tree import COMPREHENSIONS, FUNCTIONS, child_nodes, header, last_name, walk_ast

__all__ = [
    "Use",
    "bound_by",
    "bound_names",
    "defaults",
    "free_name",
    "global_bindings",
    "global_uses",
    "has_star_import",
    "loaded",
    "local_names",
    "names_in",
    "nested_names",
    "own_names",
    "parameter_names",
    "parameters",
    "provided_names",
    "read_names",
    "unresolved_names",
    "unresolved_uses",
    "used_names",
]

# The most frequent nodes that bind nothing.
_PLAIN = frozenset(
    {ast.Attribute, ast.Constant, ast.Call, ast.Expr, ast.Assign, ast.BinOp, ast.Subscript, ast.keyword}
)
# Cache size: readers and routes query the same few functions repeatedly. Trees never change, so entries stay
# valid.
_ASKED = 16


def parameters(function: FunctionNode | ast.Lambda) -> list[ast.arg]:
    """Every parameter of a function in its order, ``*args`` and ``**kwargs`` included."""
    arguments = function.args
    every = (
        *arguments.posonlyargs,
        *arguments.args,
        arguments.vararg,
        *arguments.kwonlyargs,
        arguments.kwarg,
    )
    return [parameter for parameter in every if parameter is not None]


def parameter_names(function: FunctionNode | ast.Lambda) -> set[str]:
    """The names of `parameters`."""
    return {parameter.arg for parameter in parameters(function)}


def defaults(function: FunctionNode | ast.Lambda) -> dict[str, ast.expr | None]:
    """The default of every parameter that takes a single argument, in their order; None if it has none."""
    spec = function.args
    positional = [*spec.posonlyargs, *spec.args]
    values = [*[None] * (len(positional) - len(spec.defaults)), *spec.defaults, *spec.kw_defaults]
    names = [parameter.arg for parameter in (*positional, *spec.kwonlyargs)]
    return dict(zip(names, values, strict=True))


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


def free_name(function: FunctionNode, wanted: str) -> str:
    """``wanted``, or a similar name that the function does not use."""
    taken = names_in(function)
    name = wanted
    while name in taken:
        name = f"veomni_{name}"
    return name


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


def bound_by(statement: ast.stmt) -> set[str]:
    """Every name that a statement binds itself, without those of nested statements."""
    return {name for node in (statement, *header(statement)) for name in _binds(node)}


def nested_names(tree: ast.Module) -> set[str]:
    """Every name that the code binds in a scope inside it: comprehensions, lambdas, functions, classes."""
    names: set[str] = set()
    for node in walk_ast(tree):
        if isinstance(node, (*FUNCTIONS, ast.Lambda, ast.ClassDef, *COMPREHENSIONS)):
            names |= bound_names(child_nodes(node))
    return names


def read_names(node: ast.AST) -> set[str]:
    """Every name in an expression, without attributes and keywords."""
    return {name.id for name in walk_ast(node) if isinstance(name, ast.Name)}


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
    elif isinstance(node, (*FUNCTIONS, ast.ClassDef)):
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
        if isinstance(node, (*FUNCTIONS, ast.Lambda)):
            todo += [*_defaults(node), *getattr(node, "decorator_list", [])]
        elif isinstance(node, ast.ClassDef):
            todo += [*node.bases, *(keyword.value for keyword in node.keywords), *node.decorator_list]
        elif isinstance(node, COMPREHENSIONS):
            todo.append(node.generators[0].iter)
            # A walrus in a comprehension binds in the function around it.
            yield from (inner.target for inner in walk_ast(node) if isinstance(inner, ast.NamedExpr))
        else:
            todo += child_nodes(node)


def loaded(nodes: Iterable[ast.AST], skip: Sequence[ast.AST] = ()) -> list[str]:
    """Every name that the code reads, in text order."""
    names: list[str] = []
    for node in nodes:
        if any(node is skipped for skipped in skip):
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            names.append(node.id)
        names += loaded(child_nodes(node), skip)
    return names


@dataclass(frozen=True)
class Use:
    """A use of a global name; the node has the position."""

    name: str
    node: ast.expr | ast.stmt


def global_uses(tree: ast.Module, names: Iterable[str]) -> list[Use]:
    """Every use of one of the module-level ``names``, in text order.

    A name that a parameter, a local or the variable of a comprehension hides does not count. Quoted
    annotations count.
    """
    wanted = frozenset(names)
    return sorted(_uses(tree.body, wanted, wanted), key=lambda use: (use.node.lineno, use.node.col_offset))


@lru_cache(maxsize=_ASKED)
def global_bindings(tree: ast.Module) -> frozenset[str]:
    """Every name that the module binds at top level or by ``global``, including in branches."""
    declared = {name for n in walk_ast(tree) if isinstance(n, ast.Global) for name in n.names}
    return frozenset(own_names(tree.body) | declared)


def has_star_import(tree: ast.Module) -> bool:
    """Whether the module uses ``import *``, so that its text does not show all of its names."""
    return "*" in global_bindings(tree)


def _uses(nodes: Iterable[ast.AST], visible: frozenset[str], wanted: frozenset[str]) -> Iterator[Use]:
    """Yield uses in nodes; ``visible`` are the wanted names that refer to the global here."""
    for node in nodes:
        if isinstance(node, ast.Name):
            if node.id in visible and not isinstance(node.ctx, ast.Store):
                yield Use(node.id, node)
        elif isinstance(node, ast.AugAssign):
            read = [node.target] if isinstance(node.target, ast.Name) else []
            yield from (Use(target.id, target) for target in read if target.id in visible)
            yield from _uses([node.target, node.value], visible, wanted)
        elif isinstance(node, FUNCTIONS):
            yield from _uses([*node.decorator_list, *_defaults(node)], visible, wanted)
            for annotation in (*(parameter.annotation for parameter in parameters(node)), node.returns):
                yield from _annotation(annotation, visible, wanted)
            declared = {name for n in walk_ast(node) if isinstance(n, ast.Global) for name in n.names}
            yield from _uses(node.body, (visible - local_names(node)) | (declared & wanted), wanted)
        elif isinstance(node, ast.Lambda):
            yield from _uses(_defaults(node), visible, wanted)
            yield from _uses([node.body], visible - parameter_names(node), wanted)
        elif isinstance(node, COMPREHENSIONS):
            bound = {n.id for g in node.generators for n in walk_ast(g.target) if isinstance(n, ast.Name)}
            first, *others = node.generators
            yield from _uses([first.iter], visible, wanted)
            parts = [child for child in child_nodes(node) if not isinstance(child, ast.comprehension)]
            later = [part for other in others for part in (other.iter, *other.ifs)]
            yield from _uses([*parts, *first.ifs, *later], visible - bound, wanted)
        elif isinstance(node, ast.AnnAssign):
            yield from _annotation(node.annotation, visible, wanted)
            yield from _uses([n for n in (node.target, node.value) if n is not None], visible, wanted)
        else:
            yield from _uses(child_nodes(node), visible, wanted)


def _defaults(function: FunctionNode | ast.Lambda) -> list[ast.expr]:
    """The defaults of a function's parameters, which are evaluated around it."""
    return [default for default in defaults(function).values() if default is not None]


def _annotation(node: ast.expr | None, visible: frozenset[str], wanted: frozenset[str]) -> Iterator[Use]:
    if node is None:
        return
    yield from _uses([node], visible, wanted)
    for child in _outside_literals(node):
        if isinstance(child, ast.Constant) and isinstance(child.value, str):
            try:
                quoted = ast.parse(child.value.strip(), mode="eval").body
            except SyntaxError:
                continue
            for use in _annotation(quoted, visible, wanted):
                yield Use(use.name, child)


def _outside_literals(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    if isinstance(node, ast.Subscript) and last_name(node.value) == "Literal":
        return
    for child in child_nodes(node):
        yield from _outside_literals(child)


# Names that the import system and class bodies bind; a function with `super` refers to `__class__`.
_IMPLICIT = frozenset(
    "__annotations__ __builtins__ __cached__ __class__ __doc__ __file__ __loader__ __module__ __name__ "
    "__package__ __path__ __qualname__ __spec__".split()
)
_WRITERS = frozenset({"exec", "globals"})


def provided_names(text: str, tree: ast.Module) -> set[str]:
    """Every name that a module binds when it runs, in any branch and by ``global``; not the builtins."""
    return _provided(tree, _tables(text))


def unresolved_names(text: str, tree: ast.Module) -> set[str]:
    """The names that the module reads as globals and that neither it nor Python provides.

    Args:
        text: the module's source.
        tree: its syntax tree.
    """
    if has_star_import(tree):
        return set()
    tables = _tables(text)
    read = {
        symbol.get_name()
        for table in tables
        for symbol in table.get_symbols()
        if symbol.is_referenced() and symbol.is_global()
    }
    if read & _WRITERS:
        return set()
    missing = read.difference(_provided(tree, tables), _IMPLICIT, dir(builtins))
    if not missing:
        return missing
    # Some occur only in annotations and in code that expects a NameError.
    mentioned = {use.name for use in global_uses(tree, missing) if isinstance(use.node, ast.Name)}
    return missing - (mentioned - {use.name for use in unresolved_uses(tree, missing)})


def unresolved_uses(tree: ast.Module, names: set[str]) -> list[Use]:
    """Reads of these global names in code that runs, in text order."""
    harmless = {id(node) for root in _harmless(tree, in_function=False) for node in walk_ast(root)}
    uses = global_uses(tree, names)
    return [use for use in uses if isinstance(use.node, ast.Name) and id(use.node) not in harmless]


def _tables(text: str) -> list[symtable.SymbolTable]:
    """The scopes of a module, its own first."""
    tables = [symtable.symtable(text, "<module>", "exec")]
    for table in tables:  # the list grows during the loop
        # Since Python 3.14, annotations are separate scopes, which are evaluated only on request.
        tables += [inner for inner in table.get_children() if str(inner.get_type()) != "annotation"]
    return tables


def _provided(tree: ast.Module, tables: list[symtable.SymbolTable]) -> set[str]:
    bound = {
        symbol.get_name()
        for place, table in enumerate(tables)
        for symbol in table.get_symbols()
        if (symbol.is_assigned() or symbol.is_imported()) and (place == 0 or symbol.is_declared_global())
    }
    never_run = [s for node in tree.body if _is_for_type_checkers(node) for s in node.body]
    if not never_run:
        return bound
    run = [s for n in tree.body for s in (n.orelse if _is_for_type_checkers(n) else [n])]
    return bound - (own_names(never_run) - own_names(run))


def _is_for_type_checkers(node: ast.stmt) -> TypeGuard[ast.If]:
    return isinstance(node, ast.If) and last_name(node.test) == "TYPE_CHECKING"


def _harmless(node: ast.AST, *, in_function: bool) -> Iterator[ast.AST]:
    """Code in which a missing name is not an error: it never runs, or it expects a NameError."""
    if in_function and isinstance(node, ast.AnnAssign):
        yield node.annotation
    if isinstance(node, ast.Try):
        expected = loaded(handler.type for handler in node.handlers if handler.type is not None)
        yield from node.body if "NameError" in expected else ()
    inside = in_function or isinstance(node, (*FUNCTIONS, ast.Lambda))
    if isinstance(node, ast.ClassDef):
        inside = False
    for child in ast.iter_child_nodes(node):
        yield from _harmless(child, in_function=inside)
