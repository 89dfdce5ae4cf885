"""Find undefined global names that a module's code reads, which raise a NameError when it runs.

Scopes come from `symtable`, as in the compiler. In a module that uses ``import *`` or writes to
``globals()``, every name counts as provided.
"""

from __future__ import annotations

import ast
import builtins
import symtable
from collections.abc import Iterator
from typing import TypeGuard

from veomni_hook.patches.code.expressions import last_name
from veomni_hook.patches.code.scope import Use, global_uses, has_star_import, own_names
from veomni_hook.patches.code.walk import FUNCTIONS, walk_ast

__all__ = ["provided_names", "unresolved_names", "unresolved_uses"]

# Names that the import system and class bodies bind; a function with `super` refers to `__class__`.
_IMPLICIT = frozenset(
    {
        "__annotations__",
        "__builtins__",
        "__cached__",
        "__class__",
        "__doc__",
        "__file__",
        "__loader__",
        "__module__",
        "__name__",
        "__package__",
        "__path__",
        "__qualname__",
        "__spec__",
    }
)
_WRITERS = frozenset({"exec", "globals"})


def provided_names(text: str, tree: ast.Module) -> set[str]:
    """Every name that a module binds when it runs, in any branch and by ``global``; not the builtins."""
    return _provided(tree, list(_tables(symtable.symtable(text, "<module>", "exec"))))


def unresolved_names(text: str, tree: ast.Module) -> set[str]:
    """The names that the module reads as globals and that neither it nor Python provides.

    Args:
        text: the module's source.
        tree: its syntax tree.
    """
    if has_star_import(tree):
        return set()
    tables = list(_tables(symtable.symtable(text, "<module>", "exec")))
    read = {
        symbol.get_name()
        for table in tables
        for symbol in table.get_symbols()
        if symbol.is_referenced() and symbol.is_global()
    }
    if read & _WRITERS:
        return set()
    missing = read.difference(_provided(tree, tables), _IMPLICIT, dir(builtins))
    return missing - _never_read(tree, missing) if missing else missing


def unresolved_uses(tree: ast.Module, names: set[str]) -> list[Use]:
    """Reads of these global names in code that runs, in text order."""
    harmless = {id(node) for root in _harmless(tree, in_function=False) for node in walk_ast(root)}
    uses = global_uses(tree, names)
    return [use for use in uses if isinstance(use.node, ast.Name) and id(use.node) not in harmless]


def _never_read(tree: ast.Module, names: set[str]) -> set[str]:
    """Names that occur only in annotations and in code that expects a NameError."""
    mentioned = {use.name for use in global_uses(tree, names) if isinstance(use.node, ast.Name)}
    return mentioned - {use.name for use in unresolved_uses(tree, names)}


def _tables(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    # Since Python 3.14, annotations are separate scopes, which are evaluated only on request.
    if str(table.get_type()) == "annotation":
        return
    yield table
    for child in table.get_children():
        yield from _tables(child)


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
    if isinstance(node, ast.Try) and any(_expects_name_error(handler) for handler in node.handlers):
        yield from node.body
    inside = in_function or isinstance(node, (*FUNCTIONS, ast.Lambda))
    if isinstance(node, ast.ClassDef):
        inside = False
    for child in ast.iter_child_nodes(node):
        yield from _harmless(child, in_function=inside)


def _expects_name_error(handler: ast.ExceptHandler) -> bool:
    caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(isinstance(each, ast.Name) and each.id == "NameError" for each in caught)
