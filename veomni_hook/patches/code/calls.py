"""Find where a module calls one of its functions, and which ``nn.Module`` object is available there.

A kernel belongs to a module of the model, so a call can ask for one only if there is a ``self``: in a method,
or in a function or lambda inside it. This covers calls by name, by a local or module-level alias, through
``partial``, a conditional expression, or an attribute of ``self``. Any other use is a leak.
"""

from __future__ import annotations

import ast
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from veomni_hook.patches.code.document import Document, FunctionNode
from veomni_hook.patches.code.scope import bound_by, bound_names, global_uses, local_names, parameter_names
from veomni_hook.patches.code.tree import (
    COMPREHENSIONS,
    DEFINITIONS,
    FUNCTIONS,
    child_nodes,
    last_name,
    module_statements,
    walk_ast,
)

__all__ = ["CallSite", "Calls"]

_LEAKS = "it is passed on here without being called"


@dataclass(frozen=True, slots=True)
class CallSite:
    """One use of the function.

    Attributes:
        node: the expression whose value is the function.
        where: qualified name of the method or function around it; empty at module level.
        owner: the name of the module object there; empty if there is none.
        reason: why it cannot ask for a kernel.
        only_if: a global; the call is a call of the function only if the expression's value is this global.
        leak: whether the function is passed on, so that its calls cannot be followed.
    """

    node: ast.expr
    where: str
    owner: str = ""
    reason: str = ""
    only_if: str = ""
    leak: bool = False


class Calls:
    """The uses of some functions of one module.

    Args:
        document: the module.
        names: its top-level functions.
        notes: a prefix of the names of decorators that only record a function, without calling or changing
            it; passing the function to one of them is not a use.
    """

    def __init__(self, document: Document, names: Iterable[str], *, notes: str = "") -> None:
        self._document = document
        self._notes = notes
        self._names = tuple(names)
        self._claimed: set[ast.expr] = set()

    def sites(self, name: str) -> list[CallSite]:
        """Every use of the function ``name``, in text order."""
        sites = [site for use in self._uses.get(name, ()) for site in self._classify(use, name)]
        return sorted(sites, key=lambda site: (site.node.lineno, site.node.col_offset))

    def rebound(self, name: str) -> int:
        """The line where the module binds ``name`` a second time, or 0."""
        lines = sorted(
            statement.lineno
            for statement in module_statements(self._document.tree)
            if name in bound_by(statement)
        )
        return lines[1] if len(lines) > 1 else 0

    @cached_property
    def _tops(self) -> list[ast.stmt]:
        """Top-level statements that mention a name; classes are reduced to the members that do."""
        names = "|".join(map(re.escape, (*self._names, *self._aliases)))
        source = self._document.source
        kept = re.findall(rf"\.(\w+)\s*=\s*(?:{names})\b", source)
        mentioned = re.compile("|".join([names, *(rf"\.{name}\b" for name in kept)]))
        lines = [self._document.lineno(match.start()) for match in mentioned.finditer(source)]

        def mentions(node: ast.stmt) -> bool:
            first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
            return bisect_left(lines, first) < bisect_right(lines, node.end_lineno or first)

        tops = [node for node in self._document.tree.body if mentions(node)]
        for number, node in enumerate(tops):
            if isinstance(node, ast.ClassDef):
                body = [member for member in node.body if mentions(member)]
                reduced = ast.ClassDef(node.name, node.bases, node.keywords, body, node.decorator_list)
                tops[number] = ast.copy_location(reduced, node)
        return tops

    @cached_property
    def _aliases(self) -> Mapping[str, str]:
        """Other global names of the functions: ``alias = name`` at the top level."""
        aliases: dict[str, str] = {}
        for node in self._document.tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name):
                named = aliases.get(node.value.id, node.value.id)
                for target in node.targets:
                    if isinstance(target, ast.Name) and named in self._names and not self.rebound(target.id):
                        aliases[target.id] = named
        return aliases

    @cached_property
    def _uses(self) -> Mapping[str, list[ast.expr]]:
        tree = ast.Module(body=self._tops, type_ignores=[])
        uses: dict[str, list[ast.expr]] = {}
        for use in global_uses(tree, [*self._names, *self._aliases]):
            # Quoted annotations are not used at run time.
            if isinstance(use.node, ast.Name):
                uses.setdefault(self._aliases.get(use.name, use.name), []).append(use.node)
        return uses

    @cached_property
    def _parents(self) -> Mapping[ast.AST, ast.AST]:
        nodes = (node for top in self._tops for node in walk_ast(top))
        return {child: node for node in nodes for child in child_nodes(node)}

    def _classify(self, use: ast.expr, name: str) -> Iterator[CallSite]:
        place, assignment = self._holder(use), self._parents.get(use)
        is_alias = (
            isinstance(assignment, ast.Assign)
            and assignment in self._document.tree.body
            and getattr(assignment.targets[0], "id", None) in self._aliases
        )
        if is_alias or self._is_note(use):
            return
        if self._is_callee(place) or self._is_called_local(place):
            yield self._call(use)
        elif (stored := self._stored(use)) is not None:
            yield from self._attribute_sites(*stored, name)
        else:
            yield CallSite(use, self._where(use), reason=_LEAKS, leak=True)

    def _is_callee(self, node: ast.expr) -> bool:
        return getattr(self._parents.get(node), "func", None) is node

    def _holder(self, node: ast.expr) -> ast.expr:
        """The outermost expression with the function as value: conditional expressions and ``partial``."""
        parent = self._parents.get(node)
        if isinstance(parent, ast.IfExp) and node is not parent.test:
            return self._holder(parent)
        if isinstance(parent, ast.Call) and parent.args[:1] == [node]:
            if last_name(parent.func) == "partial":
                return self._holder(parent)
        return node

    def _is_note(self, use: ast.expr) -> bool:
        """Whether this is only an argument of a decorator such as ``use_kernelized_func(function)``."""
        call = self._parents.get(use)
        if isinstance(call, ast.List | ast.Tuple):
            call = self._parents.get(call)
        if not isinstance(call, ast.Call) or not self._notes:
            return False
        decorated = self._parents.get(call)
        decorates = call in getattr(decorated, "decorator_list", ())
        return decorates and last_name(call.func).startswith(self._notes)

    def _is_called_local(self, place: ast.expr) -> bool:
        """Whether ``place`` is assigned to a local name that is only called."""
        assignment = self._parents.get(place)
        if not isinstance(assignment, ast.Assign | ast.AnnAssign) or assignment.value is not place:
            return False
        targets = assignment.targets if isinstance(assignment, ast.Assign) else [assignment.target]
        around = next(iter(self._around(place)), None)
        if not isinstance(around, FUNCTIONS) or not all(isinstance(target, ast.Name) for target in targets):
            return False
        names = {target.id for target in targets if isinstance(target, ast.Name)}
        if any(isinstance(node, ast.Global | ast.Nonlocal) for node in walk_ast(around)):
            return False
        loads = [
            node
            for node in walk_ast(around)
            if isinstance(node, ast.Name) and node.id in names and not isinstance(node.ctx, ast.Store)
        ]
        return all(self._is_callee(node) for node in loads)

    def _stored(self, use: ast.expr) -> tuple[ast.ClassDef, str] | None:
        """The class and the attribute that stores the function: ``self.x = function``."""
        assignment = self._parents.get(use)
        method, owner = self._method(use)
        if not isinstance(assignment, ast.Assign) or method is None or owner is None:
            return None
        name = _self_name(method, owner)
        target = assignment.targets[0]
        if len(assignment.targets) > 1 or not isinstance(target, ast.Attribute) or name is None:
            return None
        return (owner, target.attr) if getattr(target.value, "id", "") == name else None

    def _attribute_sites(self, owner: ast.ClassDef, attribute: str, name: str) -> Iterator[CallSite]:
        """Uses of ``self.attribute`` in a class and its subclasses in this module."""
        family = {owner.name}
        for class_ in (node for node in self._tops if isinstance(node, ast.ClassDef)):
            if class_ is not owner and not family & {getattr(base, "id", "") for base in class_.bases}:
                continue
            family.add(class_.name)
            for node in walk_ast(class_):
                if not isinstance(node, ast.Attribute) or node.attr != attribute:
                    continue
                if not isinstance(node.ctx, ast.Load):
                    continue
                site = self._call(node)
                if getattr(node.value, "id", "") != site.owner:
                    continue
                if not self._is_callee(node):
                    yield replace(site, owner="", reason=_LEAKS, leak=True)
                elif node in self._claimed:
                    yield replace(site, owner="", reason=f"self.{attribute} may be another function")
                else:
                    self._claimed.add(node)
                    yield replace(site, only_if=name)

    def _call(self, node: ast.expr) -> CallSite:
        where = self._where(node)
        method, owner = self._method(node)
        if self._in_string(node):
            # Python 3.11 does not know its position.
            return CallSite(node, where, reason="an f-string calls it")
        if method is None or owner is None:
            place = "a function" if where else "the module's top level"
            return CallSite(node, where, reason=f"{place} calls it, where no module is available")
        name = _self_name(method, owner)
        if name is None:
            return CallSite(node, where, reason="a method without an instance calls it")
        for scope in self._around(node):
            if scope is method:
                break
            if name in _bound_in(scope):
                return CallSite(node, where, reason=f"{name} is rebound where it is called")
        return CallSite(node, where, name)

    def _in_string(self, node: ast.AST) -> bool:
        parent = self._parents.get(node)
        return parent is not None and (isinstance(parent, ast.JoinedStr) or self._in_string(parent))

    def _around(self, node: ast.AST) -> Iterator[ast.AST]:
        """The scopes around a node, innermost first: functions, lambdas, comprehensions, classes."""
        child = node
        while (parent := self._parents.get(child)) is not None:
            outside = child in getattr(parent, "decorator_list", ()) or isinstance(child, ast.arguments)
            kinds = (*DEFINITIONS, ast.Lambda, *COMPREHENSIONS)
            if isinstance(parent, kinds) and not outside:
                yield parent
            child = parent

    def _method(self, node: ast.AST) -> tuple[FunctionNode | None, ast.ClassDef | None]:
        """The innermost method around a node, and its class."""
        scopes = list(self._around(node))
        for inner, outer in pairwise(scopes):
            if isinstance(inner, ast.ClassDef):
                break
            if isinstance(inner, FUNCTIONS) and isinstance(outer, ast.ClassDef):
                return inner, outer
        return None, None

    def _where(self, node: ast.AST) -> str:
        names: list[str] = []
        for scope in self._around(node):
            if isinstance(scope, FUNCTIONS) and names:
                names.append("<locals>")
            if isinstance(scope, DEFINITIONS):
                names.append(scope.name)
        return ".".join(reversed(names))


def _self_name(method: FunctionNode, owner: ast.ClassDef) -> str | None:
    """The name of the instance in a method; None if there is none or if the method rebinds it."""
    decorators = {getattr(node, "id", "") for node in method.decorator_list}
    positional = [*method.args.posonlyargs, *method.args.args]
    if decorators & {"staticmethod", "classmethod"} or method.name == "__new__" or not positional:
        return None
    if not owner.bases:
        return None  # a class without bases is not an nn.Module
    name = positional[0].arg
    stored = {
        node.id
        for node in walk_ast(method)
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)
    }
    return None if name in stored else name


def _bound_in(scope: ast.AST) -> Set[str]:
    if isinstance(scope, FUNCTIONS):
        return local_names(scope)
    if isinstance(scope, ast.Lambda):
        return parameter_names(scope)
    return bound_names(generator.target for generator in getattr(scope, "generators", ()))
