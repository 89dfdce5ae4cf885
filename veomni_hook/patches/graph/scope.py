"""The meaning of the module-level names of one file, from its own imports and definitions."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.redefinitions import Redefinitions
from veomni_hook.patches.code.tree import module_statements, walk_ast

__all__ = ["Scope"]

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_BUILTINS = frozenset(dir(builtins))
_ROOTS = ("torch.nn.Module", "builtins.object")
# Methods by which a class may change its own attributes, or those of its subclasses.
_DYNAMIC = {"__getattribute__", "__init_subclass__"}


class Scope:
    """The global names of one module.

    The meaning of a name is unknown if the module binds it in several ways (in ``try`` and ``except``, by
    ``global`` in a function). The same holds for a method that the module may replace.

    Args:
        tree: the module.
        source: its text, which makes the search for replacements faster.

    Attributes:
        functions: the module's top-level functions that are bound once, by name.
        classes: the top-level classes that are bound once, by name.
        cache: forms that `canonical` has made, by function and class.
        replaced: the definitions that the module itself replaces.
        refused: the class's name to the reason why a method is unknown.
    """

    def __init__(self, tree: ast.Module, source: str | None = None) -> None:
        self.functions: dict[str, FunctionNode] = {}
        self.classes: dict[str, ast.ClassDef] = {}
        self.cache: dict[tuple[int, int], object] = {}
        self.replaced = Redefinitions(tree, source)
        self.refused: dict[str, str] = {}
        self._meanings: dict[str, str | None] = {}
        self._assignments: dict[ast.ClassDef, dict[str, int]] = {}
        self._star = False
        self._class_definitions: list[ast.ClassDef] = []
        for statement in module_statements(tree):
            if isinstance(statement, ast.ClassDef):
                self._class_definitions.append(statement)
            for name, meaning in self._bindings(statement):
                known = self._meanings.get(name, meaning)
                self._meanings[name] = meaning if known == meaning else None
        for name in _declared_global(tree) if source is None or "global " in source else ():
            self._meanings[name] = None
        for statement in tree.body:
            name = getattr(statement, "name", "")
            if self._meanings.get(name) != _local_meaning(statement) or self.replaced.line(name):
                continue
            if isinstance(statement, _FUNCTIONS):
                self.functions[name] = statement
            elif isinstance(statement, ast.ClassDef):
                self.classes[name] = statement

    def resolve(self, name: str) -> str:
        """The full name of a global: ``torch.nn.functional``, ``builtins.int``.

        A name that the module defines itself, or whose meaning is unknown, gets a colon (``:rotate_half``).
        """
        if name in self._meanings:
            meaning = self._meanings[name]
            return f":{name}" if meaning is None or meaning.startswith(":") else meaning
        if name in _BUILTINS and not self._star:
            return f"builtins.{name}"
        return f":{name}"

    def method(
        self, owner: ast.ClassDef, name: str, *, above: bool = False
    ) -> tuple[FunctionNode, ast.ClassDef] | None:
        """The method ``self.name`` of an instance of ``owner``, and the class that defines it.

        Args:
            above: start after ``owner`` itself, as ``super()`` does.

        None if it is unknown: a class of another file is in between, a subclass of ``owner`` in this file
        overrides the method, or the module may replace it.
        """
        chain: list[ast.ClassDef] = []
        for base in self.lineage(owner):
            if base is None:
                return None
            chain.append(base)
            if name in _methods(base) and (len(chain) > 1 or not above):
                reason = self._why_unknown(owner, name, chain[1:] if above else chain, above=above)
                if reason:
                    self.refused[owner.name] = reason
                return None if reason else (_methods(base)[name], base)
        return None

    def why_refused(self, name: str) -> str:
        """Why a method of a class is unknown, as the end of a sentence; empty if none is."""
        return f"; {self.refused[name]}" if name in self.refused else ""

    def lineage(self, owner: ast.ClassDef) -> Iterator[ast.ClassDef | None]:
        """``owner`` and its base classes of this file, in order; None for one that is defined elsewhere.

        The lineage ends at ``object`` and ``nn.Module``. It ends with None at a class with several bases.
        """
        seen: set[str] = set()
        current: ast.ClassDef | None = owner
        while current is not None and current.name not in seen:
            seen.add(current.name)
            yield current
            bases = [self.dotted(base) for base in current.bases]
            bases = [base for base in bases if base not in _ROOTS]
            if not bases:
                return
            own = [base[1:] for base in bases if base.startswith(":")]
            current = self.classes.get(own[0]) if len(bases) == 1 and own else None
        yield None

    def dotted(self, node: ast.expr) -> str:
        """The full name of an expression of names and dots; empty for any other expression."""
        if isinstance(node, ast.Name):
            return self.resolve(node.id)
        if isinstance(node, ast.Attribute):
            base = self.dotted(node.value)
            return f"{base}.{node.attr}" if base else ""
        return ""

    def _why_unknown(self, owner: ast.ClassDef, name: str, chain: list[ast.ClassDef], *, above: bool) -> str:
        """Why an instance of ``owner`` may have another method of this name; empty if it may not.

        Args:
            chain: the classes in which it is looked up, up to the one that defines it.
        """
        subclasses = self._subclasses(owner)
        for holder in chain if above else (*subclasses, *chain):
            if number := self.replaced.line(f"{holder.name}.{name}"):
                return f"{holder.name}.{name} may be replaced at line {number}"
            if not above and (number := self._assignment_line(holder, name)):
                return f"{holder.name} assigns self.{name} at line {number}"
            if special := _methods(holder).keys() & _DYNAMIC:
                return f"{holder.name} defines {', '.join(sorted(special))} (line {holder.lineno})"
        own = {id(base) for base in self.lineage(owner) if base is not None}
        for subclass in subclasses:
            for base in self.ancestors(subclass):
                if base is None:
                    return f"{subclass.name} may inherit another {name} (line {subclass.lineno})"
                if id(base) in own or (above and base in subclasses):
                    continue
                if (method := _methods(base).get(name)) is not None:
                    return f"{subclass.name} has {base.name}.{name} (line {method.lineno})"
        return ""

    def ancestors(self, owner: ast.ClassDef) -> Iterator[ast.ClassDef | None]:
        """A class and its base classes; None for a base of another file that precedes one of this file."""
        pending, seen = [owner], set[int]()
        for current in pending:
            if id(current) in seen:
                continue
            seen.add(id(current))
            yield current
            names = [self.dotted(base) for base in current.bases]
            own = [number for number, name in enumerate(names) if name.startswith(":")]
            for number, name in enumerate(names):
                bases = [known for known in self._class_definitions if name == f":{known.name}"]
                pending += bases
                if not bases and name not in _ROOTS and own and number < own[-1]:
                    yield None

    def _assignment_line(self, owner: ast.ClassDef, name: str) -> int:
        """The line where a method of a class assigns ``self.<name>``, or 0."""
        lines = self._assignments.get(owner)
        if lines is None:
            lines = self._assignments[owner] = {
                node.attr: node.lineno
                for method in owner.body
                if isinstance(method, _FUNCTIONS)
                for node in walk_ast(method)
                if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load)
                if getattr(node.value, "id", "") == "self"
            }
        return lines.get(name, 0)

    def _subclasses(self, owner: ast.ClassDef) -> list[ast.ClassDef]:
        classes = [owner]
        for base in classes:
            for candidate in self._class_definitions:
                if candidate not in classes and any(
                    self.dotted(expression) == f":{base.name}" for expression in candidate.bases
                ):
                    classes.append(candidate)
        return classes[1:]

    def _bindings(self, statement: ast.stmt) -> Iterator[tuple[str, str]]:
        if isinstance(statement, ast.Import):
            for alias in statement.names:
                top = alias.name.partition(".")[0]
                yield (alias.asname, alias.name) if alias.asname else (top, top)
        elif isinstance(statement, ast.ImportFrom):
            module = "." * statement.level + (statement.module or "")
            separator = "" if module.endswith(".") else "."
            for alias in statement.names:
                self._star |= alias.name == "*"
                yield alias.asname or alias.name, f"{module}{separator}{alias.name}"
        elif isinstance(statement, (*_FUNCTIONS, ast.ClassDef)):
            yield statement.name, _local_meaning(statement)
        elif isinstance(
            statement, ast.Expr | ast.Assign | ast.AnnAssign | ast.AugAssign | ast.For | ast.With | ast.Delete
        ):
            for name in _assigned_names(statement):
                yield name, f":{statement.lineno}"
        elif isinstance(statement, ast.If | ast.While):
            for name in _assigned_names(statement.test):
                yield name, f":{statement.lineno}"


def _local_meaning(statement: ast.stmt) -> str:
    # With the line: two definitions of one name are two meanings.
    return f":{statement.lineno}"


def _methods(owner: ast.ClassDef) -> dict[str, FunctionNode]:
    return {node.name: node for node in owner.body if isinstance(node, _FUNCTIONS)}


def _assigned_names(statement: ast.AST) -> Iterator[str]:
    targets: list[ast.AST]
    if isinstance(statement, ast.For):
        targets = [statement.target]
    elif isinstance(statement, ast.With):
        targets = [item.optional_vars for item in statement.items if item.optional_vars is not None]
    else:
        targets = [statement]
    for target in targets:
        for node in walk_ast(target):
            if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
                yield node.id


def _declared_global(tree: ast.Module) -> Iterator[str]:
    """Names that a function declares ``global``."""
    for node in walk_ast(tree):
        if isinstance(node, ast.Global):
            yield from node.names
