"""What the attributes of a class are: ``__init__`` is followed, and a value is the module that it creates.

Where ``forward`` asks for a setting, ``__init__`` is followed again for each value that the setting may have:

    self.mixer = Attention(config) if config.layer_types[index] == "full_attention" else Recurrence(config)
    self.kind = config.layer_types[index]

A setting has one of the values that the class names: upstream's models have a mask for these alone, and fail
with others.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence, Set
from typing import Any

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.scope import own_names, parameter_names
from veomni_hook.patches.code.tree import binding, last_name, own_attribute, swapped, walk_ast
from veomni_hook.patches.idioms.layer_loop.collections import Collections
from veomni_hook.patches.idioms.layer_loop.shapes import FILLED
from veomni_hook.patches.idioms.layer_loop.values import (
    EMPTY,
    PLAIN,
    Items,
    Many,
    Method,
    Module,
    Plain,
    Unknown,
    Value,
    all_joined,
    bare,
    joined,
)
from veomni_hook.patches.interpreter.domain import Frame
from veomni_hook.patches.interpreter.walk import assign, evaluate, run
from veomni_hook.patches.routes.view import ModuleView

__all__ = ["ACTIVATION", "LOOK_UPS", "Attributes", "dimensions_of", "lineage", "method_of"]

_SEQUENTIAL = "torch.nn.Sequential"
_LISTS = ("torch.nn.ModuleList", "torch.nn.ModuleDict")
_FILLED_LATER = Many(Unknown("an empty list of modules that is filled later"))
_PARAMETERS = tuple(f"torch.nn.{name}" for name in ("Parameter", "Buffer", "ParameterList", "ParameterDict"))
#: Methods of modules that return the module.
_RETURN_SELF = frozenset(
    {"to", "float", "half", "double", "bfloat16", "type", "cpu", "cuda", "eval", "train", "requires_grad_"}
)
#: The table of activations, and how other files' classes look to positions.
LOOK_UPS = ("ACT2FN", "ACT2CLS", "get_activation")
ACTIVATION, _LINEAR, _NORM = "torch.nn.SiLU", "torch.nn.Linear", "torch.nn.RMSNorm"
#: Norms of packages, of the last dimension.
_PACKAGED = frozenset({"FusedRMSNormGated"})
#: Stands for every value of a setting that a class does not name.
_ANOTHER = ""
_PURE = (ast.Name, ast.Attribute, ast.Subscript, ast.Constant, ast.expr_context)


def lineage(view: ModuleView, name: str) -> list[ast.ClassDef]:
    """A class of the file and those that it inherits from, in the order in which methods are looked up."""
    owner = view.scope.classes.get(name)
    return (
        [ancestor for ancestor in view.scope.ancestors(owner) if ancestor is not None]
        if owner is not None
        else []
    )


def method_of(view: ModuleView, name: str, method: str, above: ast.ClassDef | None = None) -> Method | None:
    """A method of an instance of a class; what ``super()`` gives in the class ``above``.

    None if a class of another file defines it, or none.
    """
    holding = [owner for owner in lineage(view, name) if method in view.methods(owner)]
    if above is not None:
        holding = holding[holding.index(above) + 1 :] if above in holding else []
    return Method(view.methods(holding[0])[method], Module((name,)), holding[0]) if holding else None


def dimensions_of(view: ModuleView, name: str, attribute: str) -> int | None:
    """How many dimensions a parameter or buffer has that ``__init__`` makes; None if it does not say.

    self.table = nn.Buffer(torch.zeros(config.vocab_size, self.top_k))
    """
    inits = [
        init for owner in lineage(view, name) if (init := view.methods(owner).get("__init__")) is not None
    ]
    for node in (node for init in inits for node in walk_ast(init)):
        match node:
            case ast.Assign(targets=[target], value=ast.Call(args=[ast.Call(args=sizes) as made, *_])):
                stored = own_attribute(target)
            case ast.Call(
                func=ast.Attribute(attr="register_buffer"),
                args=[ast.Constant(stored), ast.Call(args=sizes) as made, *_],
            ):
                pass
            case _:
                continue
        if stored == attribute and last_name(made.func) in FILLED:
            return None if any(isinstance(size, ast.Tuple | ast.Starred) for size in sizes) else len(sizes)
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
            for owner in reversed(lineage(self.view, name)):
                attributes = _Making(self.view).attributes(self.view.methods(owner).get("__init__"))
                for later in _stored(self.view, owner, "__init__") & attributes.keys():
                    if isinstance(attributes[later], Plain):
                        attributes[later] = PLAIN  # a constant in `__init__` is not one that stays
                self._known[name].update(attributes)
        return self._known[name]

    def chosen(self, name: str, test: ast.expr, *, outcome: bool) -> dict[str, Value]:
        """The attributes of an instance of a class, in the branch for ``outcome`` of a condition.

        They are empty unless it asks for a setting that ``__init__`` knows as well.
        """
        owners = lineage(self.view, name)
        inits = [init for owner in owners if (init := self.view.methods(owner).get("__init__")) is not None]
        if len(inits) != 1:
            return {}
        (init,) = inits
        stored = [attribute for owner in owners for attribute in _stored(self.view, owner)]
        assigned = _assigned(init, test)
        if stored.count(own_attribute(test)) == len(assigned) == 1 and _compared(assigned[0]) is not None:
            # A flag that says whether a setting is equal to something.
            attributes = [node for node in walk_ast(init) if isinstance(node, ast.Attribute)]
            reads = [node for node in attributes if isinstance(node.ctx, ast.Load)]
            swaps = {id(node): assigned for node in reads if own_attribute(node) == own_attribute(test)}
            test, init = assigned[0], swapped(init, swaps)
        asked = _compared(test)
        if asked is None:
            return {}
        read, value, equal = asked
        setting = {ast.dump(read)}
        if own_attribute(read):
            assigned = _assigned(init, read)
            if stored.count(own_attribute(read)) != 1 or len(assigned) != 1:
                return {}
            setting.add(ast.dump(assigned[0]))
            read = assigned[0]
        if not _is_given(read, init):
            return {}
        making = _Making(self.view, setting)
        once = {attribute for attribute in making.attributes(init) if stored.count(attribute) == 1}
        others = making.named - {value} or {_ANOTHER}
        values = sorted({value} if equal is outcome else others) if making.named else []
        several = [_Making(self.view, setting, value).attributes(init) for value in values]
        once = once.intersection(*several) if several else set()
        return {attribute: all_joined(one[attribute] for one in several) for attribute in sorted(once)}


class _Making(Collections):
    """Follow an ``__init__``: what is no module, or is not followed, is plain.

    Args:
        view: the file.
        setting: the code of a setting.
        value: what the setting is; None if it is not known.

    Attributes:
        made: the attributes; what several statements assign is joined.
        named: the values with which the setting is compared.
    """

    def __init__(self, view: ModuleView, setting: Set[str] = frozenset(), value: str | None = None) -> None:
        super().__init__()
        self.view, self.setting, self.value = view, setting, value
        self.made: dict[str, Value] = {}
        self.named: set[str] = set()

    def attributes(self, init: FunctionNode | None) -> dict[str, Value]:
        """The attributes that a method assigns."""
        if init is not None:
            run(init.body, Frame(self, dict.fromkeys(parameter_names(init), PLAIN)))
        return self.made

    def other(self, node: ast.expr, frame: Frame[Value]) -> Value:
        return PLAIN if isinstance(node, ast.GeneratorExp) else super().other(node, frame)

    def free(self, node: ast.Name, frame: Frame[Value]) -> Value:
        for statement in self.view.document.tree.body:
            name, value = binding(statement)
            if name == node.id and isinstance(value, ast.Dict):
                return evaluate(value, frame)
        return self._class(node)

    def _class(self, node: ast.expr) -> Value:
        """The class that an expression names, as a module without instance; PLAIN for other code."""
        name = self.view.scope.dotted(node)
        last = name.rpartition(".")[2].removeprefix(":")
        if name.endswith(LOOK_UPS):
            return Module((ACTIVATION,))
        if last in self.view.classes and not name.startswith("torch.nn."):
            return Module((last,), instance=False)
        if _PACKAGED.intersection(self.view.from_packages(last)):
            return Module((_NORM,), instance=False)
        if not name.startswith((".", "torch.nn.")) or not last[:1].isupper() or name in _PARAMETERS:
            return PLAIN
        alike = {".activations": ACTIVATION, ".pytorch_utils": _LINEAR}
        return Module((alike.get(f".{name.split('.')[-2]}", name),), instance=False)

    def attribute(self, value: Value, node: ast.Attribute, frame: Frame[Value]) -> Value:
        if isinstance(value, Module) and value.instance and node.attr in _RETURN_SELF:
            return value
        return self._class(node)

    def subscript(self, value: Value, node: ast.Subscript, frame: Frame[Value]) -> Value:
        return value.value if isinstance(value, Many) else value if isinstance(value, Module) else PLAIN

    def call(self, node: ast.Call, frame: Frame[Value]) -> Value:
        match node.func:
            case ast.Attribute(value=ast.Name(id=name), attr="append") if node.args and name in frame.values:
                # Of a list that grows, only what its items have in common is remembered.
                former, value = frame.values[name], evaluate(node.args[0], frame)
                frame.values[name] = Many(joined(former.value if isinstance(former, Many) else EMPTY, value))
                return PLAIN
        function = bare(evaluate(node.func, frame))
        if not isinstance(function, Module) or function.instance:
            return function if isinstance(function, Module) else PLAIN
        inner = [evaluate(argument, frame) for argument in node.args]
        if function.names == (_SEQUENTIAL,):
            return Items(tuple(inner))
        if function.names[0] in _LISTS:
            return inner[0] if inner else _FILLED_LATER
        return Module(function.names)

    def binary(self, operator: ast.operator, left: Value, right: Value, node: ast.expr) -> Value:
        return left if isinstance(operator, ast.Mult) and isinstance(left, Items | Many) else PLAIN

    def _plain(self, *_: Any, **__: Any) -> Value:
        """The value of what is no module."""
        return PLAIN

    unclear = unary = compare = logic = _plain

    def test(self, node: ast.expr, frame: Frame[Value]) -> bool | Value:
        asked = _compared(node)
        if asked is None or ast.dump(asked[0]) not in self.setting:
            return PLAIN
        self.named.add(asked[1])
        return PLAIN if self.value is None else (asked[1] == self.value) is asked[2]

    def knows(self, statement: ast.If | ast.Assert, frame: Frame[Value]) -> bool:
        if isinstance(statement, ast.If):
            test = self.test(statement.test, frame)
            sides = [frame.fork() for block in (True, False) if test in (block, PLAIN)]
            blocks = [statement.body, statement.orelse][test is False :]
            for side, block in zip(sides, blocks, strict=False):
                run(block, side)
            self.go_on(frame, [side.values for side in sides])
        return True

    def loop(self, statement: ast.For, frame: Frame[Value]) -> None:
        assign(statement.target, PLAIN, frame)
        run(statement.body, frame)

    def augmented(self, node: ast.AugAssign, frame: Frame[Value]) -> None:
        assign(node.target, PLAIN, frame)

    def store(self, target: ast.expr, value: Value, frame: Frame[Value]) -> None:
        if name := own_attribute(target):
            if isinstance(value, Module) and not value.instance:
                value = PLAIN  # the class itself
            value = joined(self.made.get(name, value), value)
            several = Unknown("an attribute that is made in several ways")
            self.made[name] = several if isinstance(value, Unknown) else value

    def unpacked(self, value: Value, targets: Sequence[ast.expr]) -> Sequence[Value]:
        return [PLAIN] * len(targets)

    def statement(self, node: ast.stmt, frame: Frame[Value]) -> None:
        if isinstance(node, ast.Try):
            for block in (
                node.body,
                *(handler.body for handler in node.handlers),
                node.orelse,
                node.finalbody,
            ):
                run(block, frame)


def _stored(view: ModuleView, owner: ast.ClassDef, *but: str) -> list[str]:
    """The attributes that methods of a class assign, one for each statement."""
    methods = [method for name, method in view.methods(owner).items() if name not in but]
    nodes = [node for method in methods for node in walk_ast(method) if isinstance(node, ast.Attribute)]
    return [name for node in nodes if not isinstance(node.ctx, ast.Load) if (name := own_attribute(node))]


def _assigned(init: FunctionNode, attribute: ast.expr) -> list[ast.expr]:
    """What ``__init__`` assigns to an attribute of its instance."""
    statements = [node for node in init.body if isinstance(node, ast.Assign)]
    name = own_attribute(attribute)
    return [node.value for node in statements if name and [*map(own_attribute, node.targets)] == [name]]


def _compared(test: ast.expr) -> tuple[ast.expr, str, bool] | None:
    """What a condition compares with which text, and whether it holds if they are equal."""
    match test:
        case ast.Compare(
            left=left, ops=[ast.Eq() | ast.NotEq() as operator], comparators=[ast.Constant(str() as value)]
        ):
            return left, value, isinstance(operator, ast.Eq)
    return None


def _is_given(value: ast.expr, init: FunctionNode) -> bool:
    """Whether an expression reads what ``__init__`` is given, and has the same value all through it."""
    names = {name.id for name in walk_ast(value) if isinstance(name, ast.Name)}
    pure = all(isinstance(part, _PURE) for part in walk_ast(value))
    return pure and names <= parameter_names(init) and names.isdisjoint(own_names(init.body))
