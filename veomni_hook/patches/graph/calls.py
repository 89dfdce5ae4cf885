"""Calls as nodes: torch operations, functions and methods of the same file, unknown code."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.scope import local_names
from veomni_hook.patches.code.tree import decorator_name
from veomni_hook.patches.graph import normal_forms, operations
from veomni_hook.patches.graph.changes import write
from veomni_hook.patches.graph.nodes import Node, constant, is_constant
from veomni_hook.patches.graph.normal_forms import normal_form
from veomni_hook.patches.graph.operations import (
    Operation,
    dtype_of,
    is_dtype,
    is_number,
    named_dtype,
    roots,
)
from veomni_hook.patches.graph.scope import Scope
from veomni_hook.patches.interpreter.domain import Frame, UnclearError
from veomni_hook.patches.interpreter.walk import bound, evaluate, run, super_name

__all__ = ["HARMLESS_DECORATORS", "Trace", "call"]

_MOST_CALLS = 6
#: Decorators that do not change what a function computes.
HARMLESS_DECORATORS = (
    "staticmethod",
    "script",
    "use_kernel_func_from_hub",
    "use_kernel_forward_from_hub",
    "compile_friendly",
)

# Methods that cast to the dtype of their name in torch.
_CASTS = ("float", "double", "half", "bfloat16", "long", "int", "bool")


@dataclass(eq=False)
class Trace:
    """What all frames of one evaluation share.

    Attributes:
        scope: the module's names.
        calls: the opaque calls, in the order of evaluation.
        loops: the number of loops that have been entered.
    """

    scope: Scope
    calls: list[Node] = field(default_factory=list)
    loops: int = 0
    _serials: Counter[bytes] = field(default_factory=Counter)

    def opaque(self, args: tuple[Node, ...], keywords: tuple[str, ...], origin: ast.expr) -> Node:
        """A call of unknown code: two identical calls have different results.

        Args:
            args: the callee, the positional arguments, the values of ``keywords``.
            keywords: their names.
            origin: the upstream expression.
        """
        key = Node("call", args, keywords).key
        serial = self._serials[key]
        self._serials[key] += 1
        call = Node("call", args, (len(args) - 1 - len(keywords), keywords, serial), origin)
        self.calls.append(call)
        return call


def call(node: ast.Call, frame: Frame[Node], trace: Trace) -> Node:
    """The value of a call."""
    function = node.func
    parent = _method(frame.home, super_name(function), trace, above=True)
    receiver = None
    if isinstance(function, ast.Attribute) and parent is None:
        receiver = evaluate(function.value, frame)
        callee = frame.domain.attribute(receiver, function, frame)
    else:
        callee = Node("global", (), "builtins.super") if parent else evaluate(function, frame)
    invocation = _Call(node, frame, trace)
    if "out" in invocation.keywords:
        raise UnclearError("out= writes to a tensor", node, writes=True)
    result = None
    if parent is not None:
        result = invocation.followed(*parent)
    elif callee.op == "global":
        result = invocation.of_global(str(callee.value))
    elif isinstance(function, ast.Attribute) and receiver is not None:
        if receiver.op != "self":
            result = invocation.of_tensor(function, receiver)
        elif callee == Node("attribute", (), function.attr):
            method = _method(frame.owner, function.attr, trace)
            result = invocation.followed(*method) if method is not None else None
    if result is None:
        return invocation.unknown(callee)
    if result.origin is not node:
        facts, result = result.facts, result.at(node)
        result.facts.update((fact, None) for fact in ("followed", "own") if fact in facts)
    return result


class _Call:
    """A call with its arguments, which are evaluated when it is made.

    Attributes:
        plain: whether there are no ``*`` and ``**`` arguments.
    """

    def __init__(self, node: ast.Call, frame: Frame[Node], trace: Trace) -> None:
        self.node = node
        self.frame = frame
        self.trace = trace
        self.positional = elements(node.args, frame)
        self.keywords: dict[str, Node] = {}
        for keyword in node.keywords:
            value = evaluate(keyword.value, frame)
            if keyword.arg is None and "**" in self.keywords:
                raise UnclearError("** twice in one call", node)
            self.keywords[keyword.arg or "**"] = value
        self.plain = "**" not in self.keywords and all(value.op != "star" for value in self.positional)

    def of_global(self, path: str) -> Node | None:
        """The result of a function with this full name; None if it is unknown."""
        operation = operations.function(path)
        if operation is not None and self.plain:
            from_method = path.startswith("torch.Tensor.")
            result = self._operation(operation, self.positional, from_method=from_method)
            if result is not None:
                return result
        if path.startswith(":") and (function := self.trace.scope.functions.get(path[1:])) is not None:
            return self.followed(function)
        package, _, name = path.rpartition(".")
        if package != "builtins" or self.keywords or not self.plain or not self.positional:
            return None
        return self._builtin(name)

    def _builtin(self, name: str) -> Node | None:
        first, *others = self.positional
        node = None
        if name == "getattr" and len(others) == 1 and first.op in ("self", "attribute"):
            (wanted,) = others
            if wanted.op == "constant" and isinstance(wanted.value, str):
                prefix = f"{first.value}." if first.op == "attribute" else ""
                node = Node("attribute", (), f"{prefix}{wanted.value}", self.node)
        elif others:
            pass
        elif name == "int" and is_number(first):
            whole = first.op in ("size", "ndim", "floordiv", "len")
            node = first if whole else Node("int", (first,), None, self.node)
        elif name in ("tuple", "list") and first.op in ("tuple", "shape", "part"):
            node = first
        elif name == "len":
            operands = ("ndim", first.args) if first.op == "shape" else ("len", (first,))
            node = Node(*operands, None, self.node)
        return node

    def of_tensor(self, function: ast.Attribute, receiver: Node) -> Node | None:
        """The result of a tensor's method, which may change it in place; None if it is unknown."""
        name = function.attr
        if name.startswith("__i") and name.endswith("__"):
            raise UnclearError(f"{name} changes a tensor in place", self.node, writes=True)
        if not name.endswith("_") or name.endswith("__"):
            return self._of_method(name, receiver)
        name = name[:-1]
        result = self._of_method(name, receiver) or self.unknown(Node("getattr", (receiver,), name))
        return write(function.value, receiver, normal_forms.updated(receiver, result), self.frame)

    def _of_method(self, name: str, receiver: Node) -> Node | None:
        if name in ("to", "type", "type_as", *_CASTS):
            return self._to(name, receiver)
        operation = operations.method(name)
        if operation is None or receiver.op in ("tuple", "dict", "shape"):
            return None
        if name == "view" and any(map(is_dtype, (*self.positional, *self.keywords.values()))):
            return None  # reinterprets the bits as another dtype
        if "**" in self.keywords or (operation.variadic is None and not self.plain):
            return None
        return self._operation(operation, [receiver, *self.positional], from_method=True)

    def _to(self, name: str, receiver: Node) -> Node | None:
        keywords = {key: value for key, value in self.keywords.items() if key not in ("non_blocking", "copy")}
        values = [*self.positional, *keywords.values()]
        if name in _CASTS:
            return None if values else normal_forms.cast(receiver, named_dtype(f"torch.{name}"), self.node)
        if name == "type_as":
            other = self.positional[0] if self.positional else keywords.get("other")
            dtype = None if other is None else dtype_of(other)
            return None if dtype is None else normal_forms.cast(receiver, dtype, self.node)
        if not set(keywords) <= {"dtype", "device", "other"} or not values:
            return None
        result: Node | None = receiver
        for value in values:
            if result is not None:
                result = self._moved(result, value)
        return result

    def _moved(self, tensor: Node, value: Node) -> Node | None:
        """Apply one argument of ``Tensor.to``: a dtype, a device, or a tensor that has both."""
        if is_dtype(value) or self.keywords.get("dtype") is value:
            return tensor if value == constant(None) else normal_forms.cast(tensor, value, self.node)
        named = value.op == "constant" and isinstance(value.value, str)
        if named or value.op == "device" or self.keywords.get("device") is value:
            return Node("to_device", (tensor, value), None, self.node)
        if value.op in ("cast", "mul", "add", "sub", "linear", "mean", "rsqrt"):
            dtype = dtype_of(value)
            cast = tensor if dtype is None else normal_forms.cast(tensor, dtype)
            return Node("to_device", (cast, Node("device", (value,))), None, self.node)
        return None

    def _operation(self, operation: Operation, positional: list[Node], *, from_method: bool) -> Node | None:
        """The node of a known operation; None if the arguments do not fit its parameters."""
        names = operation.parameters
        if from_method and operation.variadic is not None and len(positional) > operation.variadic:
            rest = positional[operation.variadic :]
            positional = [*positional[: operation.variadic], _sequence(rest)]
        if len(positional) > len(names):
            return None
        operands: dict[str, Node] = dict(zip(names, positional, strict=False))
        for keyword, value in self.keywords.items():
            # numpy's names, which reductions accept as well
            name = {"axis": "dim", "keepdims": "keepdim"}.get(keyword, keyword)
            if name not in names or name in operands:
                return None
            operands[name] = value
        for name, default in zip(names, operation.defaults, strict=True):
            if default is not None:
                operands.setdefault(name, default)
        if len(operands) < len(names):
            return None
        self._refuse_inplace(operands.get("inplace"))
        args = [operands[name] for name in names if name != "inplace" and not name.startswith("_")]
        return normal_form(operation.name, args, self.node)

    def _refuse_inplace(self, flag: Node | None) -> None:
        if flag is not None and not is_constant(flag, value=False):
            raise UnclearError("inplace= changes a tensor in place", self.node, writes=True)

    def unknown(self, callee: Node) -> Node:
        """The value of a call of code that is not known."""
        self._refuse_inplace(self.keywords.get("inplace"))
        path = str(callee.value) if callee.op == "global" else ""
        if path.startswith("torch.nn.functional.") and constant(value=True) in self.positional:
            raise UnclearError(f"{path} may change its argument in place", self.node, writes=True)
        names = tuple(sorted(self.keywords))
        args = (callee, *self.positional, *(self.keywords[name] for name in names))
        if operations.is_pure(path):
            return Node("call", args, (len(self.positional), names, 0), self.node)
        if path.endswith("_") and not path.endswith("__"):
            raise UnclearError(f"{path} changes its argument in place", self.node, writes=True)
        return self.trace.opaque(args, names, self.node)

    def followed(self, function: FunctionNode, home: ast.ClassDef | None = None) -> Node | None:
        """The result of a call of a function of this file; None if the call is not followed.

        Args:
            function: the function, or the method of ``self``.
            home: the class that defines the method.

        Raises:
            UnclearError: the function changes an argument in place.
        """
        frame, calls = self.frame, self.trace.calls
        decorators = [decorator_name(decorator) for decorator in function.decorator_list]
        if (
            isinstance(function, ast.AsyncFunctionDef)
            or not self.plain
            or frame.depth >= _MOST_CALLS
            or any(name not in HARMLESS_DECORATORS for name in decorators)
        ):
            return None
        on_instance = home is not None and "staticmethod" not in decorators
        positional = [Node("self"), *self.positional] if on_instance else self.positional
        values = _parameter_values(function, positional, self.keywords)
        if values is None:
            return None
        borrowed = frozenset(root for value in values.values() for root in roots(value))
        inner = Frame(frame.domain, values, local_names(function), frame.depth + 1, borrowed=borrowed)
        inner.effects = frame.effects
        if home is not None:
            inner.owner, inner.home = frame.owner, home
            inner.values.update(_attributes(frame))
        known, effects = len(calls), len(frame.effects)
        try:
            result = run(function.body, inner)
        except UnclearError as error:
            # A call that is not followed becomes an unknown call, unless it may have changed known values.
            if error.writes:
                raise
            del calls[known:], frame.effects[effects:]
            return None
        if home is not None:
            frame.values.update(_attributes(inner))
        if result is not None and result.op == "raise":
            return None
        frame.domain.followed[f"{home.name}.{function.name}" if home is not None else function.name] = None
        value = Node("constant") if result is None else Node(result.op, result.args, result.value)
        value.facts["followed"] = None
        return value


def elements(nodes: Iterable[ast.expr], frame: Frame[Node]) -> list[Node]:
    """The values of arguments or elements; those of a starred one that are not known are one ``star``."""
    values: list[Node] = []
    for node in nodes:
        if isinstance(node, ast.Starred):
            value = evaluate(node.value, frame)
            values += value.args if value.op == "tuple" else (Node("star", (value,)),)
        else:
            values.append(evaluate(node, frame))
    return values


def _sequence(arguments: list[Node]) -> Node:
    """The sequence that a variadic parameter gets: one sequence, or separate arguments."""
    if len(arguments) == 1:
        (only,) = arguments
        if only.op == "star":
            return only.args[0]
        if only.op in ("tuple", "shape", "part", "argument", "attribute"):
            return only
    return Node("tuple", tuple(arguments))


def _method(
    owner: ast.ClassDef | None, name: str, trace: Trace, *, above: bool = False
) -> tuple[FunctionNode, ast.ClassDef] | None:
    """A method of ``self`` whose class is ``owner``, or, with ``above``, of ``super()`` in that class."""
    return trace.scope.method(owner, name, above=above) if owner is not None and name else None


def _attributes(frame: Frame[Node]) -> dict[str, Node]:
    """The attributes of ``self`` that were set, as ``self.<name>``."""
    return {name: value for name, value in frame.values.items() if name.startswith("self.")}


def _parameter_values(
    function: FunctionNode, positional: list[Node], keywords: dict[str, Node]
) -> dict[str, Node] | None:
    """The value of each parameter; None if the call does not fit, or passes anything to ``*`` or ``**``."""
    call = bound(function, positional, keywords)
    if call.rest or call.others or call.repeated:
        return None
    for name, default in call.defaults.items():
        if not isinstance(default, ast.Constant):
            return None
        call.values[name] = constant(default.value)
    if function.args.vararg is not None:
        call.values[function.args.vararg.arg] = Node("tuple")
    if function.args.kwarg is not None:
        call.values[function.args.kwarg.arg] = Node("dict")
    return call.values
