"""Evaluate calls in layer code: functions and modules of the file, torch's, and attention."""

from __future__ import annotations

import ast
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce

from veomni_hook.patches.code.tree import chain, decorator_name
from veomni_hook.patches.idioms.layer_loop.expressions import Environment, Expressions
from veomni_hook.patches.idioms.layer_loop.joining import joined
from veomni_hook.patches.idioms.layer_loop.known_names import (
    ATTENTION_ARGUMENTS,
    DECORATORS,
    INTERFACE,
    LOOPS,
    NORMS,
    NUMBERS,
    POINTWISE,
    QUESTIONS,
    RANDOM,
)
from veomni_hook.patches.idioms.layer_loop.modules import lineage, method_of
from veomni_hook.patches.idioms.layer_loop.operations import torch_name
from veomni_hook.patches.idioms.layer_loop.shapes import fresh
from veomni_hook.patches.idioms.layer_loop.values import (
    BATCH,
    NOTHING,
    PLAIN,
    POSITIONS,
    Attention,
    Items,
    Many,
    Maybe,
    Method,
    Module,
    Operation,
    Own,
    Plain,
    Size,
    Tensor,
    Unknown,
    Value,
    Whole,
    is_positional,
    of_all,
    read_from,
)
from veomni_hook.patches.idioms.moe_experts import find as moe_experts
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Missed, Status

__all__ = ["CallArguments", "Calls"]

_DEPTH = 40
_CAST = "torch.amp.autocast_mode._cast"
#: Where the arguments begin that ``apply_chunking_to_forward`` passes on.
_CHUNKED = 3


@dataclass(frozen=True)
class CallArguments:
    """The arguments of a call; ``bag`` is a value for all positions after ``**``."""

    given: tuple[Value, ...] = ()
    named: Mapping[str, Value] = field(default_factory=dict)
    bag: Whole | None = None

    @property
    def every(self) -> list[Value]:
        """All values, with those inside of tuples, lists and dictionaries."""
        return list(of_all([*self.given, *self.named.values()]))

    @property
    def first(self) -> Value:
        """The first argument."""
        return next(iter((*self.given, *self.named.values())), PLAIN)


class Calls(Expressions):
    """Evaluates calls.

    Args:
        view: the file.
    """

    def __init__(self, view: ModuleView) -> None:
        super().__init__(view)
        self._depth = 0
        #: The functions and methods that were followed, which a route relies on.
        self.followed: set[str] = set()
        #: Whether their own idiom knows what experts compute.
        self._experts = {
            site.target.partition(".")[0]: site.status is Status.ROUTED
            for site in view.sites(moe_experts.find)
        }

    @abstractmethod
    def body(self, statements: Iterable[ast.stmt], scope: Environment) -> Value:
        """Run a function's body; the value is what it returns."""

    def call(self, node: ast.Call, scope: Environment) -> Value:
        """The result of a call.

        Raises:
            Missed: it moves or mixes positions, or cannot be followed.
        """
        if self._is_super(node.func):
            return self._above(node, scope)
        if chain(node.func) == f"{INTERFACE}.get_interface":
            return Attention()
        dotted = self.view.scope.dotted(node.func) if not self._is_local(node.func, scope) else ""
        arguments = self._arguments(node, scope)
        known = self._known(dotted, arguments, node)
        if known is not None:
            return known
        return self._called(self.evaluate(node.func, scope), arguments, node, dotted)

    def _known(self, dotted: str, arguments: CallArguments, node: ast.Call) -> Value | None:
        """The result of a function that is known by its name; None for others."""
        if dotted.startswith("builtins."):
            values = [*arguments.given, *arguments.named.values()]
            return self._builtin(dotted.rpartition(".")[2], values, node)
        if name := torch_name(dotted):
            return self._torch(name, arguments, node)
        if dotted.startswith("torch.nn.") and dotted.rpartition(".")[2][:1].isupper():
            return Module((dotted,), node)
        if dotted.partition(".")[0] in (":logger", "warnings"):
            return PLAIN
        return arguments.given[0] if dotted == _CAST and arguments.given else None

    _call = call

    def _called(self, function: Value, arguments: CallArguments, node: ast.Call, dotted: str = "") -> Value:
        function = function.value if isinstance(function, Maybe) else function
        if isinstance(function, Attention):
            return self._attend(arguments, node)
        if isinstance(function, Method):
            return self.invoke(function, arguments, node)
        if isinstance(function, Module):
            results = [self._module(name, function.made, arguments, node) for name in function.names]
            return reduce(joined, results)
        if isinstance(function, Operation):
            return self._operation(function, arguments, node)
        if isinstance(function, Items):
            value = arguments.first
            for each in function.values:
                value = self._called(each, CallArguments((value,)), node)
            return value
        return self._other(function, arguments, node, dotted)

    def _other(self, function: Value, arguments: CallArguments, node: ast.Call, dotted: str) -> Value:
        """A function of another file: it must not get a part of the positions."""
        if isinstance(function, Unknown):
            raise Missed(f"it calls {function.reason}", node)
        if dotted.endswith("apply_chunking_to_forward") and len(arguments.given) > _CHUNKED:
            return self._called(arguments.given[0], CallArguments(arguments.given[_CHUNKED:]), node)
        for each in arguments.every:
            if isinstance(each, Tensor):
                raise Missed(f"it calls {ast.unparse(node.func)}, which is not followed", node)
            if isinstance(each, Size):
                self.tensor_like(each, node)
        return next((each for each in arguments.every if isinstance(each, Whole | Unknown)), PLAIN)

    def _arguments(self, node: ast.Call, scope: Environment) -> CallArguments:
        """The arguments of a call."""
        given: list[Value] = []
        for each in node.args:
            value = self.evaluate(each, scope)
            if not isinstance(each, ast.Starred):
                given.append(value)
            elif isinstance(value, Items):
                given += value.values
            elif isinstance(value, Whole):
                continue
            else:
                raise Missed("arguments of unknown number", node)
        named: dict[str, Value] = {}
        bag = None
        for keyword in node.keywords:
            value = self.evaluate(keyword.value, scope)
            if keyword.arg is not None:
                named[keyword.arg] = value
            elif isinstance(value, Whole):
                bag = value
                named.update(value.held)
            elif not (isinstance(value, Many | Plain) and not _holds_tensor(value)):
                raise Missed("keyword arguments that are not known", node)
        return CallArguments(tuple(given), named, bag)

    def _builtin(self, name: str, given: list[Value], node: ast.Call) -> Value:
        first = given[0] if given else PLAIN
        if name in (*QUESTIONS, "tuple", "list"):
            return PLAIN if name in QUESTIONS else first
        if name == "len":
            if isinstance(first, Tensor):
                return Size(first.dims[0])
            return Plain(len(first.values)) if isinstance(first, Items) else PLAIN
        if name in _LISTS:
            return _LISTS[name](given, node)
        if name not in (*NUMBERS, *LOOPS, "getattr"):
            raise Missed(f"it calls {name}, which is not followed", node)
        for each in of_all(given):
            if isinstance(each, Whole) and name == "getattr":
                return each
            if isinstance(self.tensor_like(each, node), Tensor):
                raise Missed(f"{name} of values of some positions", node)
        return first if name in LOOPS and isinstance(first, Items | Many) else PLAIN

    def _torch(self, name: str, arguments: CallArguments, node: ast.Call) -> Value:
        if name in RANDOM:
            raise Missed("it draws random numbers, which differ between ranks", node)
        for each in arguments.every:
            if isinstance(each, Whole | Unknown):
                self.tensor_like(each, node)
        if any(isinstance(each, Tensor) for each in arguments.every):
            return self.called(name, arguments.given, arguments.named, node)
        if any(isinstance(each, Size) and is_positional(each.dim) for each in arguments.every):
            raise Missed(f"it calls {name} with the number of positions", node)
        return PLAIN

    def _operation(self, function: Operation, arguments: CallArguments, node: ast.Call) -> Value:
        """A method of a value."""
        value, name = function.value, function.name
        if isinstance(value, Tensor):
            for each in arguments.every:
                if isinstance(each, Whole | Unknown):
                    self.tensor_like(each, node)
            return self.called(name, [value, *arguments.given], arguments.named, node)
        if isinstance(value, Whole):
            stored = arguments.given[:2]
            if name == "update" and len(stored) == 2 and all(isinstance(each, Tensor) for each in stored):
                return Items(stored)  # the cache is empty: it returns what it is given
            if name in ("get", "pop", "items", "keys", "values", "copy"):
                return read_from(value, arguments.first if name in ("get", "pop") else PLAIN, node)
            raise Missed(f"it asks {value.name} for {name}", node)
        if isinstance(value, Many) and name in ("values", "get"):
            return value if name == "values" else value.value
        if isinstance(value, Many | Items) and name in ("keys", "items", "index", "count"):
            return PLAIN
        raise Missed(f"it calls {ast.unparse(node.func)}, which is not followed", node)

    def _attend(self, arguments: CallArguments, node: ast.Call) -> Value:
        """Attention of the user's implementation: what it gets must be what the all-to-all expects."""
        names = ("module", "query", "key", "value", "attention_mask")
        passed = {**dict(zip(names, arguments.given, strict=False)), **arguments.named}
        for name in ("query", "key", "value"):
            tensor = passed.get(name)
            dims = tensor.dims if isinstance(tensor, Tensor) else ()
            right = len(dims) == 4 and dims[2] == (POSITIONS,) and dims[0] in ((BATCH,), ())
            if not right or is_positional(dims[1]) or is_positional(dims[3]):
                raise Missed(f"the {name} of its attention is not [batch, heads, positions, width]", node)
        for name, value in passed.items():
            if name not in (*names, *ATTENTION_ARGUMENTS):
                raise Missed(f"its attention takes {name}, which may hold positions", node)
            if name not in names[:4] and any(isinstance(each, Tensor) for each in of_all([value])):
                raise Missed(f"its attention takes a part of the positions as {name}", node)
        result = Tensor(((BATCH,), (POSITIONS,), fresh(), fresh()))
        return Items((result, Unknown("attention weights, which hold a part of the positions")))

    def _module(self, name: str, made: ast.expr | None, arguments: CallArguments, node: ast.Call) -> Value:
        """A call of an instance of one class."""
        first = arguments.first
        if name == ":activation" or ".activations." in name:
            return self.called("silu", [self.tensor_like(first, node)], {}, node)
        if name.startswith("torch.nn."):
            return self._torch_module(name.removeprefix("torch.nn."), first, made, node)
        if name.endswith("pytorch_utils.Conv1D"):
            return self.called("linear", [self.tensor_like(first, node)], {}, node)
        if name not in self.view.scope.classes:
            raise Missed(f"{name.rpartition('.')[2]} is a class of another file", node)
        if name in self._experts:
            return self._sent(name, arguments, node)
        found = method_of(self.view, name, "forward")
        if method_of(self.view, name, "__call__") is not None:
            raise Missed(f"{name} defines __call__", node)
        if found is not None:
            return self.invoke(Method(found[0], Own(name)), arguments, node)
        if base := self._torch_base(name):
            return self._torch_module(base, first, made, node)
        raise Missed(f"{name} has no forward in this file", node)

    def _torch_base(self, name: str) -> str:
        """The class of torch, other than Module, that a class inherits from; empty if there is none."""
        bases = [self.view.scope.dotted(base) for owner in lineage(self.view, name) for base in owner.bases]
        known = [base for base in bases if base.startswith("torch.nn.") and base != "torch.nn.Module"]
        return known[0].removeprefix("torch.nn.") if known else ""

    def _torch_module(self, name: str, first: Value, made: ast.expr | None, node: ast.Call) -> Value:
        value = self.tensor_like(first, node)
        if not isinstance(value, Tensor):
            return PLAIN
        if name in POINTWISE:
            return value
        if name == "Linear":
            return self.called("linear", [value], {}, node)
        if name in NORMS:
            return self.called("layer_norm", [value], {}, node)
        if name == "Embedding":
            return Tensor((*value.dims, fresh()))
        if name == "Softmax" and isinstance(made, ast.Call):
            spec = self._arguments(made, {})
            return self.called("softmax", [value, *spec.given], spec.named, node)
        raise Missed(f"it calls torch's {name}, which may mix positions", node)

    def _sent(self, name: str, arguments: CallArguments, node: ast.Call) -> Value:
        """Experts that their own idiom knows: each token goes through its experts alone."""
        if not self._experts[name]:
            raise Missed(f"experts that are not recognised: {name}", self.view.classes[name])
        passed = (*arguments.given, *arguments.named.values())
        tensors = [value for value in passed if isinstance(value, Tensor)]
        rows = tensors[0].dims[0] if tensors else ()
        if len(tensors) < len(passed) or len(tensors) < 2:
            raise Missed(f"what {name} gets is not followed", node)
        if not is_positional(rows) or any(each.dims[0] != rows for each in tensors):
            raise Missed(f"what {name} gets is not one row for each position", node)
        return Tensor((rows, *(fresh() for _ in tensors[0].dims[1:])))

    def invoke(self, method: Method, arguments: CallArguments, node: ast.AST) -> Value:
        """The result of a function or method of the file.

        Raises:
            Missed: it moves or mixes positions, or cannot be followed.
        """
        function = method.node
        decorators = {decorator_name(each) for each in function.decorator_list}
        if other := sorted(name for name in decorators if name not in DECORATORS and "kernel" not in name):
            raise Missed(f"{function.name} is decorated with {other[0]}", function)
        if self._depth > _DEPTH:
            raise Missed(f"{function.name} calls itself", function)
        own: list[Value] = (
            [method.owner] if method.owner is not None and "staticmethod" not in decorators else []
        )
        home = None if method.owner is None else method_of(self.view, method.owner.owner, function.name)
        self.followed.add(function.name if home is None else f"{home[1]}.{function.name}")
        self._depth += 1
        try:
            scope = self._parameters(function, [*own, *arguments.given], arguments.named, arguments.bag)
            return self.body(function.body, scope)
        except Missed as error:
            where = f"{method.owner.owner}.{function.name}" if method.owner is not None else function.name
            text = str(error)
            raise Missed(text if ": " in text else f"{where}: {text}") from None
        finally:
            self._depth -= 1

    def _parameters(
        self,
        function: ast.FunctionDef | ast.AsyncFunctionDef,
        given: list[Value],
        named: Mapping[str, Value],
        bag: Whole | None,
    ) -> dict[str, Value]:
        """The values of a function's parameters; those that ``**`` may set are not known."""
        spec = function.args
        names = [each.arg for each in (*spec.posonlyargs, *spec.args)]
        scope: dict[str, Value] = dict(zip(names, given, strict=False))
        defaults = dict(zip(reversed(names), reversed(spec.defaults), strict=False))
        for each, default in zip(spec.kwonlyargs, spec.kw_defaults, strict=True):
            names.append(each.arg)
            if default is not None:
                defaults[each.arg] = default
        scope.update({name: value for name, value in named.items() if name in names})
        for name in names:
            if name not in scope:
                value = self.evaluate(defaults[name], {}) if name in defaults else Whole(name)
                if bag is not None and name in defaults:
                    value = Whole(name) if value == NOTHING else PLAIN
                scope[name] = value
        if spec.vararg is not None:
            scope[spec.vararg.arg] = Items(tuple(given[len(spec.posonlyargs) + len(spec.args) :]))
        elif len(given) > len(spec.posonlyargs) + len(spec.args):
            raise Missed("it gets more arguments than it has parameters", function)
        if spec.kwarg is not None:
            rest = [(name, value) for name, value in named.items() if name not in names]
            parts = tuple((name, value) for name, value in rest if _holds_tensor(value))
            scope[spec.kwarg.arg] = Whole(f"**{spec.kwarg.arg}", parts)
        return scope

    def _is_super(self, function: ast.expr) -> bool:
        inner = function.value if isinstance(function, ast.Attribute) else None
        return isinstance(inner, ast.Call) and isinstance(inner.func, ast.Name) and inner.func.id == "super"

    def _above(self, node: ast.Call, scope: Environment) -> Value:
        """A call of ``super().method``."""
        own = scope.get("self")
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        owners = list(lineage(self.view, own.owner)) if isinstance(own, Own) else []
        holding = [owner for owner in owners if name in self.view.methods(owner)]
        here = [owner for owner in holding if any(each is node for each in ast.walk(owner))]
        following = holding[holding.index(here[0]) + 1 :] if here else []
        arguments = self._arguments(node, scope)
        if not following and name == "forward" and isinstance(own, Own):
            if base := self._torch_base(own.owner):
                return self._torch_module(base, arguments.first, None, node)
        if not following or not isinstance(own, Own):
            raise Missed(f"super().{name} is in another file", node)
        return self.invoke(Method(self.view.methods(following[0])[name], own), arguments, node)

    def _is_local(self, function: ast.expr, scope: Environment) -> bool:
        while isinstance(function, ast.Attribute):
            function = function.value
        return isinstance(function, ast.Name) and function.id in scope


def _holds_tensor(value: Value) -> bool:
    return any(isinstance(each, Tensor) for each in of_all([value]))


def _numbered(given: list[Value], node: ast.AST) -> Value:
    """What ``enumerate`` gives."""
    value = given[0]
    if isinstance(value, Tensor):
        raise Missed("a loop over positions", node)
    if isinstance(value, Items):
        numbers = [PLAIN if given[1:] else Plain(number) for number in range(len(value.values))]
        return Items(tuple(Items(pair) for pair in zip(numbers, value.values, strict=True)))
    if isinstance(value, Many):
        return Many(Items((PLAIN, value.value)))
    return Many(Items((PLAIN, value if isinstance(value, Whole) else PLAIN)))


def _zipped(given: list[Value], node: ast.AST) -> Value:
    """What ``zip`` gives."""
    if any(isinstance(each, Tensor) for each in given):
        raise Missed("a loop over positions", node)
    if all(isinstance(each, Items) for each in given):
        rows = zip(*(each.values for each in given if isinstance(each, Items)), strict=False)
        return Items(tuple(Items(row) for row in rows))
    parts = [each.value if isinstance(each, Many) else each for each in given]
    if any(isinstance(each, Items) for each in parts):
        raise Missed("a loop that is not followed", node)
    return Many(Items(tuple(parts)))


_LISTS: dict[str, Callable[[list[Value], ast.AST], Value]] = {"enumerate": _numbered, "zip": _zipped}
