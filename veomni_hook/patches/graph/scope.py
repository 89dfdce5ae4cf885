"""What the module-level names of one file mean, told from its own imports and definitions."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator

from veomni_hook.patches.text.document import FunctionNode
from veomni_hook.patches.text.statements import module_statements
from veomni_hook.patches.text.walk import walk_ast

__all__ = ["Scope"]

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_BUILTINS = frozenset(dir(builtins))


class Scope:
    """The global names of one module.

    A name that the module binds twice in different ways (in ``try`` and ``except``, by ``global`` in a
    function) has no known meaning.

    Attributes:
        functions: the module's top-level functions that are bound once, by name.
        classes: the same for classes.
        cache: forms that `canonical` has made, by function and class.
    """

    def __init__(self, tree: ast.Module) -> None:
        self.functions: dict[str, FunctionNode] = {}
        self.classes: dict[str, ast.ClassDef] = {}
        self.cache: dict[tuple[int, int], object] = {}
        self._meanings: dict[str, str | None] = {}
        self._star = False
        for statement in module_statements(tree):
            for name, meaning in self._bound(statement):
                known = self._meanings.get(name, meaning)
                self._meanings[name] = meaning if known == meaning else None
        for name in _declared_global(tree):
            self._meanings[name] = None
        for statement in tree.body:
            name = getattr(statement, "name", "")
            if self._meanings.get(name) != _own(statement):
                continue
            if isinstance(statement, _FUNCTIONS):
                self.functions[name] = statement
            elif isinstance(statement, ast.ClassDef):
                self.classes[name] = statement

    def resolve(self, name: str) -> str:
        """The full name of a global: ``torch.nn.functional``, ``builtins.int``.

        What the module defines itself, and what cannot be told, is its name after a colon (``:rotate_half``).
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
        """The method that ``self.name`` is on an instance of ``owner``, and the class that defines it.

        Args:
            above: start after ``owner`` itself, as ``super()`` does.

        None if that cannot be told: a class outside this file stands in between, or a class of this file that
        derives from ``owner`` defines the method, too.
        """
        if not above and any(name in _methods(derived) for derived in self._derived(owner)):
            return None
        for number, base in enumerate(self.lineage(owner)):
            if base is None:
                return None
            if (found := _methods(base).get(name)) is not None and (number or not above):
                return found, base
        return None

    def lineage(self, owner: ast.ClassDef) -> Iterator[ast.ClassDef | None]:
        """``owner`` and its base classes of this file, in order; None where one is defined elsewhere.

        ``object`` and ``nn.Module`` end a line; several bases of this file are no line, and end with None.
        """
        seen: set[str] = set()
        current: ast.ClassDef | None = owner
        while current is not None and current.name not in seen:
            seen.add(current.name)
            yield current
            bases = [self.dotted(base) for base in current.bases]
            bases = [base for base in bases if base not in ("torch.nn.Module", "builtins.object")]
            if not bases:
                return
            own = [base[1:] for base in bases if base.startswith(":")]
            current = self.classes.get(own[0]) if len(bases) == 1 and own else None
        yield None

    def dotted(self, node: ast.expr) -> str:
        """The full name that an expression of names and dots is; empty for any other expression."""
        if isinstance(node, ast.Name):
            return self.resolve(node.id)
        if isinstance(node, ast.Attribute):
            base = self.dotted(node.value)
            return f"{base}.{node.attr}" if base else ""
        return ""

    def _derived(self, owner: ast.ClassDef) -> list[ast.ClassDef]:
        found = [owner]
        for base in found:
            for candidate in self.classes.values():
                if candidate not in found and any(self.dotted(b) == f":{base.name}" for b in candidate.bases):
                    found.append(candidate)
        return found[1:]

    def _bound(self, statement: ast.stmt) -> Iterator[tuple[str, str]]:
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
            yield statement.name, _own(statement)
        elif isinstance(
            statement, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.For | ast.With | ast.Delete
        ):
            for name in _stored(statement):
                yield name, f":{statement.lineno}"
        elif isinstance(statement, ast.If | ast.While):
            for name in _stored(statement.test):
                yield name, f":{statement.lineno}"


def _own(statement: ast.stmt) -> str:
    # With its line: two definitions of one name are two meanings.
    return f":{statement.lineno}"


def _methods(owner: ast.ClassDef) -> dict[str, FunctionNode]:
    return {node.name: node for node in owner.body if isinstance(node, _FUNCTIONS)}


def _stored(statement: ast.AST) -> Iterator[str]:
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
    """Names that a function declares ``global``, where that is a statement of the function's own block."""
    for statement in tree.body:
        members = statement.body if isinstance(statement, ast.ClassDef) else [statement]
        for member in members:
            if isinstance(member, _FUNCTIONS):
                for inner in member.body:
                    if isinstance(inner, ast.Global):
                        yield from inner.names
