"""An idiom's view of one upstream module: definitions, text, and what its classes inherit and compute."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from typing import TypeAlias

from veomni_hook.patches.code.document import Document, FunctionNode
from veomni_hook.patches.code.edit import Edit, edited
from veomni_hook.patches.code.scope import free_name
from veomni_hook.patches.code.statement_runs import Run
from veomni_hook.patches.code.tree import (
    FUNCTIONS,
    calls_in,
    decorator_name,
    in_text_order,
    initialised,
    methods_of,
    module_statements,
    own_attribute,
    walk_ast,
)
from veomni_hook.patches.graph import (
    HARMLESS_DECORATORS,
    Form,
    Node,
    Scope,
    canonical,
    digest,
    has_source,
    source,
)
from veomni_hook.patches.reasons import Code, Reason
from veomni_hook.patches.routes.config import relied_on
from veomni_hook.patches.site import Site, Status

__all__ = [
    "Method",
    "ModuleView",
    "called_otherwise",
    "defining",
    "initialised_by",
    "linear_otherwise",
    "settled",
]

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
        return Scope(self.document.tree)

    @cached_property
    def classes(self) -> dict[str, ast.ClassDef]:
        """The module's top-level classes by name; the last one if a name is repeated."""
        return {node.name: node for node in self.document.tree.body if isinstance(node, ast.ClassDef)}

    @cached_property
    def functions(self) -> dict[str, FunctionNode]:
        """The module's top-level functions by name."""
        return {node.name: node for node in self.document.tree.body if isinstance(node, FUNCTIONS)}

    @cached_property
    def assigned(self) -> dict[str, list[ast.expr]]:
        """What the classes of the module assign to attributes in ``__init__``, by the attribute's name."""
        values: dict[str, list[ast.expr]] = {}
        for owner in self.classes.values():
            for name, value in initialised(owner):
                values.setdefault(name, []).append(value)
        return values

    def methods(self, owner: ast.ClassDef) -> dict[str, FunctionNode]:
        """The methods that the body of a class defines, by name; without inherited ones."""
        return methods_of(owner)

    def inherited_methods(self, owner: ast.ClassDef) -> dict[str, FunctionNode]:
        """The methods that a class defines or inherits from classes of the module, by name."""
        methods: dict[str, FunctionNode] = {}
        for ancestor in self.scope.ancestors(owner):
            methods = (self.methods(ancestor) if ancestor is not None else {}) | methods
        return methods

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
        called = dict.fromkeys(own_attribute(call.func) for call in in_text_order(calls_in(method)))
        return {name: methods[name] for name in called if name in methods}

    def followed(self, owner: ast.ClassDef, method: FunctionNode) -> Iterator[FunctionNode]:
        """A method, and the methods of the same object that it uses, and so on; each once, nearest first."""
        methods, followed = self.inherited_methods(owner), [method]
        for function in followed:  # the list grows during the loop
            yield function
            used = (methods.get(name) for name in dict.fromkeys(map(own_attribute, walk_ast(function))))
            followed += [one for one in used if one is not None and one not in followed]

    def attributes_used(self, owner: ast.ClassDef, method: FunctionNode) -> list[str]:
        """The attributes of ``self``, other than methods and the configuration, that `followed` code uses."""
        nodes = [
            node
            for function in self.followed(owner, method)
            for node in in_text_order(one for one in walk_ast(function) if isinstance(one, ast.Attribute))
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

    def from_packages(self, name: str) -> Iterator[str]:
        """The names that a global name has in the packages from which the file may import it."""
        for statement in module_statements(self.document.tree):
            if isinstance(statement, ast.ImportFrom) and not statement.level:
                yield from (alias.name for alias in statement.names if (alias.asname or alias.name) == name)

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
        return edited(self.document.source, start, end, inside)


def settled(view: ModuleView, sites: Iterable[Site]) -> Iterator[Site]:
    """The sites; those that rely on code that the module may replace are missed, with the line as reason."""
    for site in sites:
        reason = _reason(view, site)
        if not reason or site.status is Status.REFUSED:
            yield site
        elif site.status is Status.MISSED:
            yield replace(site, reason=Reason.joined(filter(None, (site.reason, reason))))
        else:
            yield replace(
                site, status=Status.MISSED, variant="", reason=reason, captures={}, edits=(), slots=()
            )


def _reason(view: ModuleView, site: Site) -> str:
    scope = view.scope
    owner = site.target.rpartition(".")[0]
    if site.status is Status.MISSED and owner in scope.refused:
        why = Reason(scope.refused[owner], Code.REPLACED)
        return why if why not in site.reason else ""
    for name in (site.target, *relied_on(view.document, site)) if scope.replaced else ():
        if line := scope.replaced.line(name, target=name == site.target):
            return Reason(f"{name} may be replaced at line {line}", Code.REPLACED)
    return ""


_CALLING = {"__call__", "__getattribute__"}
_HARMLESS = frozenset(("__init__", "extra_repr", "reset_parameters"))


def initialised_by(view: ModuleView, owner: ast.ClassDef) -> Iterator[tuple[str, ast.expr]]:
    """What ``__init__`` assigns; for a class without one, the inherited ``__init__``."""
    lineage = filter(None, view.scope.lineage(owner))
    return initialised(next((class_ for class_ in lineage if "__init__" in view.methods(class_)), owner))


def called_otherwise(view: ModuleView, name: str) -> str:
    """Why calling an instance may do more than ``forward``; empty if it does not."""
    for owner in filter(None, view.scope.lineage(view.classes[name])):
        methods = view.methods(owner)
        for special in _CALLING & methods.keys():
            return Reason(f"{owner.name} defines {special}", Code.REPLACED, methods[special].lineno)
        forward = methods.get("forward")
        for decorator in forward.decorator_list if forward is not None else ():
            if decorator_name(decorator) not in HARMLESS_DECORATORS:
                return Reason(
                    f"{owner.name}.forward is decorated with {ast.unparse(decorator)}", Code.DECORATED
                )
        if forward is not None:
            break
    return ""


def linear_otherwise(view: ModuleView, name: str) -> str:
    """The ``forward`` or ``__call__`` that a subclass of Linear overrides; empty if neither."""
    owner = view.classes.get(name)
    classes = (
        [ancestor for ancestor in view.scope.ancestors(owner) if ancestor is not None]
        if owner is not None
        else []
    )
    bases = {view.scope.dotted(base) for class_ in classes for base in class_.bases}
    for class_ in classes if "torch.nn.Linear" in bases else ():
        for method in ("forward", "__call__"):
            if method in view.methods(class_):
                return method
            if line := view.scope.replaced.line(f"{class_.name}.{method}"):
                return f"{method} (set at line {line})"
    return ""


def defining(view: ModuleView, name: str) -> str:
    """The first class of the lineage that defines more than harmless methods, for example ``forward``."""
    for owner in filter(None, view.scope.lineage(view.classes[name])):
        name = owner.name
        if not view.methods(owner).keys() <= _HARMLESS:
            break
    return name


class Method:
    """What searches need to know about a method."""

    def __init__(self, view: ModuleView, owner: ast.ClassDef, method: FunctionNode) -> None:
        self.view = view
        self.owner = owner
        self.method = method
        self.receiver = method.args.args[0].arg
        self.target = f"{owner.name}.{method.name}"
        self.kernel = free_name(method, "kernel")

    def form_of(self, run: Run) -> Form | Reason:
        """What a run computes, as a function of the locals that it reads."""
        function = run.as_function()
        return canonical(function, self.view.scope, self.owner, body=function.body)

    def digest(self) -> str:
        """The digest of what the whole method computes; empty if it cannot be analysed."""
        form = canonical(self.method, self.view.scope, self.owner)
        return digest(form) if isinstance(form, Form) else ""

    def expression(self, node: Node) -> ast.expr | None:
        """Upstream's code for the node that a hole of a formula matches; None if the method has none."""
        if node.op == "cast" and node.origin is None:
            node = node.args[0]  # a promotion, which the formula repeats
        if node.op == "global":
            return self._global(node)
        if has_source(node):
            return ast.parse(source(node, self.receiver), mode="eval").body
        # Code of a helper uses the helper's own names.
        return node.origin if node.origin in set(walk_ast(self.method)) else None

    def _global(self, node: Node) -> ast.expr | None:
        if node.origin is None:
            # `logits.sigmoid()` has no function object that could be passed on.
            known = str(node.value).startswith("torch.") and self.view.scope.resolve("torch") == "torch"
            return ast.parse(str(node.value), mode="eval").body if known else None
        said = self.view.scope.dotted(node.origin) not in ("", f":{node.value}")
        return ast.parse(source(node), mode="eval").body if said else None
