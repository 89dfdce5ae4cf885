"""An idiom's view of one upstream module: definitions, source text, and what its functions compute."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from typing import TypeAlias

from veomni_hook.patches.code.document import Document, FunctionNode
from veomni_hook.patches.code.edit import Edit, apply_edits
from veomni_hook.patches.code.expressions import own_attribute
from veomni_hook.patches.code.statements import module_statements
from veomni_hook.patches.code.walk import calls_in, in_text_order, walk_ast
from veomni_hook.patches.graph import Scope
from veomni_hook.patches.site import Code, Reason, Site, Status

__all__ = ["ModuleView"]

Find: TypeAlias = "Callable[[ModuleView], Iterable[Site]]"


class ModuleView:
    """A parsed module; results that several idioms need are computed once."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self._sites: dict[Find, tuple[Site, ...]] = {}

    def sites(self, find: Find) -> tuple[Site, ...]:
        """What an idiom's ``find`` yields for the module; idioms that build on each other share it."""
        if find not in self._sites:
            self._sites[find] = tuple(find(self))
        return self._sites[find]

    @cached_property
    def scope(self) -> Scope:
        """The meaning of the module's global names."""
        return Scope(self.document.tree, self.document.source)

    @cached_property
    def classes(self) -> dict[str, ast.ClassDef]:
        """The module's top-level classes by name; the last one if a name is repeated."""
        return {node.name: node for node in self.document.tree.body if isinstance(node, ast.ClassDef)}

    @cached_property
    def functions(self) -> dict[str, FunctionNode]:
        """The module's top-level functions by name."""
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
        return {node.name: node for node in self.document.tree.body if isinstance(node, kinds)}

    def methods(self, owner: ast.ClassDef) -> dict[str, FunctionNode]:
        """The methods that the body of a class defines, by name; without inherited ones."""
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
        return {node.name: node for node in owner.body if isinstance(node, kinds)}

    def inherited_methods(self, owner: ast.ClassDef) -> dict[str, FunctionNode]:
        """The methods that a class defines or inherits from classes of the module, by name."""
        found: dict[str, FunctionNode] = {}
        for each in self.scope.ancestors(owner):
            found = (self.methods(each) if each is not None else {}) | found
        return found

    def every_method(self) -> Iterator[tuple[str, ast.ClassDef, FunctionNode]]:
        """Every method that a top-level class defines: as ``Class.method``, with its class, and itself."""
        for owner in self.classes.values():
            for name, method in self.methods(owner).items():
                yield f"{owner.name}.{name}", owner, method

    def every_function(self) -> Iterator[tuple[str, ast.ClassDef | None, FunctionNode]]:
        """What `every_method` yields, then the top-level functions, which have no class."""
        yield from self.every_method()
        for name, function in self.functions.items():
            yield name, None, function

    def why_unclear(self, function: FunctionNode) -> str:
        """Why its name may mean something else than a top-level function's text; empty if it may not."""
        if function.decorator_list:
            return Reason(f"it is decorated with {ast.unparse(function.decorator_list[0])}", Code.DECORATED)
        alone = self.scope.functions.get(function.name) is function
        return "" if alone else Reason("it is not the only definition of its name", Code.REPLACED)

    def helpers(self, owner: ast.ClassDef, method: FunctionNode) -> dict[str, FunctionNode]:
        """The methods of a class that one of them calls itself, by name, in the order of the calls."""
        methods = self.inherited_methods(owner)
        called = dict.fromkeys(own_attribute(each.func) for each in in_text_order(calls_in(method)))
        return {name: methods[name] for name in called if name in methods}

    def followed(self, owner: ast.ClassDef, method: FunctionNode) -> Iterator[FunctionNode]:
        """A method, and the methods of the same object that it uses, and so on; each once, nearest first."""
        methods, found = self.inherited_methods(owner), [method]
        for each in found:  # the list grows during the loop
            yield each
            used = (methods.get(name) for name in dict.fromkeys(map(own_attribute, walk_ast(each))))
            found += [one for one in used if one is not None and one not in found]

    def attributes_used(self, owner: ast.ClassDef, method: FunctionNode) -> list[str]:
        """The attributes of ``self``, other than methods and the configuration, that `followed` code uses."""
        nodes = [
            node
            for each in self.followed(owner, method)
            for node in in_text_order(one for one in walk_ast(each) if isinstance(one, ast.Attribute))
        ]
        others = {"", "config", *self.inherited_methods(owner)}
        return [name for name in dict.fromkeys(map(own_attribute, nodes)) if name not in others]

    def imported(self, op: str, name: re.Pattern[str]) -> Iterator[Site]:
        """Functions from other files whose name has ``name`` in it: their code is not in this text."""
        for statement in module_statements(self.document.tree):
            if not isinstance(statement, ast.ImportFrom):
                continue
            for alias in statement.names:
                if name.search(alias.name):
                    home = "." * statement.level + (statement.module or "")
                    said = f"it is defined in {home}, and its calls here are not followed"
                    reason = Reason(said, Code.OTHER_FILE)
                    target, lineno = alias.asname or alias.name, statement.lineno
                    yield Site(op, target, Status.UNBOUND, reason=reason, counted=False, lineno=lineno)

    def forwards(self) -> Iterator[tuple[ast.ClassDef, FunctionNode]]:
        """Every top-level class that defines ``forward``, with it."""
        for owner in self.classes.values():
            if (forward := self.methods(owner).get("forward")) is not None:
                yield owner, forward

    def text(self, node: ast.AST) -> str:
        """The source text of a node, without decorators."""
        return self.document.source[self.document.start(node) : self.document.end(node)]

    def edited(self, node: ast.AST, edits: Iterable[Edit]) -> str:
        """The `text` of a node after those of ``edits`` that are inside it."""
        start, end = self.document.start(node), self.document.end(node)
        inside = (edit for edit in edits if start <= edit.start and edit.end <= end)
        moved = [replace(edit, start=edit.start - start, end=edit.end - start) for edit in inside]
        return apply_edits(self.text(node), moved)
