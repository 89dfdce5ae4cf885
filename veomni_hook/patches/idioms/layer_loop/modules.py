"""What the attributes of a class are: modules of torch, modules of this file, functions, or plain values."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.tree import own_attribute, walk_ast
from veomni_hook.patches.idioms.layer_loop.values import (
    NOTHING,
    PLAIN,
    Items,
    Many,
    Maybe,
    Module,
    Plain,
    Unknown,
    Value,
)
from veomni_hook.patches.routes.view import ModuleView

__all__ = ["Attributes", "lineage", "method_of"]

_SEQUENTIAL = "torch.nn.Sequential"
_LISTS = ("torch.nn.ModuleList", "torch.nn.ModuleDict", _SEQUENTIAL)
#: Methods of modules that return the module.
_RETURN_SELF = frozenset(
    {"to", "float", "half", "double", "bfloat16", "type", "cpu", "cuda", "eval", "train", "requires_grad_"}
)
#: Classes of other files that have no positions to move.
_LOOK_UPS = ("ACT2FN", "ACT2CLS", "get_activation")


def lineage(view: ModuleView, name: str) -> Iterator[ast.ClassDef]:
    """A class of the file and those that it inherits from, in the order in which methods are looked up."""
    owner = view.scope.classes.get(name)
    if owner is None:
        return
    yield owner
    for base in owner.bases:
        yield from lineage(view, view.scope.dotted(base).removeprefix(":"))


def method_of(view: ModuleView, name: str, method: str) -> tuple[FunctionNode, str] | None:
    """A method of a class, and the class that defines it; None if that is not a class of the file."""
    for owner in lineage(view, name):
        if (found := view.methods(owner).get(method)) is not None:
            return found, owner.name
    return None


class Attributes:
    """The attributes that classes of one file give their instances."""

    def __init__(self, view: ModuleView) -> None:
        self.view = view
        self._known: dict[str, dict[str, Value]] = {}

    def of(self, name: str) -> dict[str, Value]:
        """The attributes that ``__init__`` of a class assigns, inherited ones included."""
        if name not in self._known:
            self._known[name] = {}
            for owner in reversed(list(lineage(self.view, name))):
                self._known[name].update(self._assigned(owner))
        return self._known[name]

    def one_of(self, init: FunctionNode, values: list[ast.expr]) -> Value:
        """What an attribute is that is one of some expressions of an ``__init__``."""
        names = _local_values(init)
        return _one([self._made(each, names) for each in values])

    def _assigned(self, owner: ast.ClassDef) -> dict[str, Value]:
        init = self.view.methods(owner).get("__init__")
        found: dict[str, list[Value]] = {}
        if init is not None:
            names = _local_values(init)
            for node in walk_ast(init):
                target, value = _assignment(node)
                if value is not None and (name := own_attribute(target)):
                    found.setdefault(name, []).append(self._made(value, names))
        made = {name: _one(values) for name, values in found.items()}
        for name in _assigned_later(owner) & made.keys():
            if isinstance(made[name], Plain):
                made[name] = PLAIN  # a constant in `__init__` is not one that stays
        return made

    def _made(self, value: ast.expr, names: dict[str, list[ast.expr]]) -> Value:
        """What an expression of ``__init__`` creates."""
        if isinstance(value, ast.Constant):
            return Plain(value.value)
        if isinstance(value, ast.ListComp):
            return Many(self._made(value.elt, names))
        if isinstance(value, ast.List | ast.Tuple):
            return Items(tuple(self._made(each, names) for each in value.elts))
        if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mult):
            return self._made(value.left, names)
        if (several := _alternatives(value, names)) is not None:
            # A name may be bound to something made of its own earlier value.
            rest = {name: values for name, values in names.items() if name != getattr(value, "id", "")}
            return _one([self._made(each, rest) for each in several])
        return self._called(value, names)

    def _called(self, value: ast.expr, names: dict[str, list[ast.expr]]) -> Value:
        """What a call creates: a module, a list of modules, or a plain value."""
        function = value.func if isinstance(value, ast.Call) else value
        if self.is_look_up(function.value if isinstance(function, ast.Subscript) else function):
            return Module((":activation",))
        if not isinstance(value, ast.Call):
            return PLAIN
        if isinstance(function, ast.Attribute) and function.attr in _RETURN_SELF:
            made = self._made(function.value, names)
            if isinstance(made, Module):
                return made
        classes = list(dict.fromkeys(self._classes(function, names)))
        if len(classes) != 1 or classes[0] not in _LISTS:
            return Module(tuple(classes), value) if classes else PLAIN
        inner = [self._made(each, names) for each in value.args]
        if classes[0] == _SEQUENTIAL:
            return Items(tuple(inner))
        return _one(inner) if inner else Many(Unknown("an empty list of modules that is filled later"))

    def _classes(self, function: ast.expr, names: dict[str, list[ast.expr]]) -> Iterator[str]:
        """The full names of the classes that a call may create an instance of."""
        if isinstance(function, ast.IfExp):
            yield from self._classes(function.body, names)
            yield from self._classes(function.orelse, names)
        elif isinstance(function, ast.Name) and function.id in names:
            rest = {name: values for name, values in names.items() if name != function.id}
            for each in names[function.id]:
                yield from self._classes(each, rest)
        elif isinstance(function, ast.Subscript):
            yield from self._in_dictionary(function.value)
        elif name := self.view.scope.dotted(function):
            last = name.rpartition(".")[2].removeprefix(":")
            if name.startswith("torch.nn.") and last[:1].isupper() and not _is_parameter(last):
                yield name
            elif last in self.view.classes:
                yield last
            elif name.startswith(".") and last[:1].isupper():
                yield name

    def _in_dictionary(self, node: ast.expr) -> Iterator[str]:
        """The classes of the file that a dictionary at its top level holds."""
        for statement in self.view.document.tree.body if isinstance(node, ast.Name) else ():
            target, value = _assignment(statement)
            if isinstance(target, ast.Name) and target.id == getattr(node, "id", ""):
                for each in value.values if isinstance(value, ast.Dict) else ():
                    if isinstance(each, ast.Name) and each.id in self.view.classes:
                        yield each.id

    def is_look_up(self, node: ast.expr) -> bool:
        """Whether an expression is transformers' table of activations."""
        return isinstance(node, ast.Name) and self.view.scope.dotted(node).endswith(_LOOK_UPS)


def _alternatives(value: ast.expr, names: dict[str, list[ast.expr]]) -> list[ast.expr] | None:
    """The expressions between which an expression chooses; None if it is no choice."""
    if isinstance(value, ast.IfExp):
        return [value.body, value.orelse]
    if isinstance(value, ast.Name) and value.id in names:
        return [each for each in names[value.id] if each is not value]
    return None


def _is_parameter(name: str) -> bool:
    return name in ("Parameter", "Buffer", "ParameterList", "ParameterDict")


def _assignment(node: ast.AST) -> tuple[ast.expr, ast.expr | None]:
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        return node.targets[0], node.value
    if isinstance(node, ast.AnnAssign):
        return node.target, node.value
    return ast.Constant(None), None


def _assigned_later(owner: ast.ClassDef) -> set[str]:
    """The attributes that methods other than ``__init__`` assign."""
    return {
        name
        for method in owner.body
        if isinstance(method, ast.FunctionDef) and method.name != "__init__"
        for node in walk_ast(method)
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load)
        if (name := own_attribute(node))
    }


def _local_values(init: FunctionNode) -> dict[str, list[ast.expr]]:
    """What ``__init__`` binds its local names to; for lists, what it appends to them."""
    found: dict[str, list[ast.expr]] = {}
    for node in walk_ast(init):
        target, value = _assignment(node)
        if isinstance(target, ast.Name) and value is not None:
            found.setdefault(target.id, []).append(value)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            if node.func.attr == "append" and isinstance(node.func.value, ast.Name):
                made = ast.ListComp(node.args[0], [])
                found.setdefault(node.func.value.id, []).append(made)
    return found


def _one(values: list[Value]) -> Value:
    """One value for all that an attribute may be."""
    values = [value for value in dict.fromkeys(values) if value != Items(())]
    modules = [value for value in values if isinstance(value, Module)]
    if len(values) == 1:
        return values[0]
    if NOTHING in values:
        return Maybe(_one([value for value in values if value != NOTHING]))
    if modules and len(modules) == len(values):
        return Module(tuple(dict.fromkeys(name for each in modules for name in each.names)), modules[0].made)
    if values and all(isinstance(value, Many) for value in values):
        return Many(_one([value.value for value in values if isinstance(value, Many)]))
    if values and all(isinstance(value, Plain) for value in values):
        return PLAIN
    return Unknown("an attribute that is made in several ways")
