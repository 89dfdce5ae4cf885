"""Calls as nodes: torch operations, functions and methods of the same file, unknown code."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.scope import local_names
from veomni_hook.patches.code.tree import decorator_name
from veomni_hook.patches.graph import normal_forms, operations
from veomni_hook.patches.graph.changes import write
from veomni_hook.patches.graph.nodes import Node, constant, is_constant
from veomni_hook.patches.graph.normal_forms import normal_form
from veomni_hook.patches.graph.operations import (
    DTYPES,
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

__all__ = ["HARMLESS_DECORATORS", "Trace", "attribute", "call"]

#: A function, the class that defines it, and whether it is called on ``self``.
Callee: TypeAlias = tuple[FunctionNode, ast.ClassDef | None, bool]

_MOST_CALLS = 6
#: Decorators that do not change what a function computes.
HARMLESS_DECORATORS = (
    "staticmethod",
    "script",
    "use_kernel_func_from_hub",
    "use_kernel_forward_from_hub",
    "compile_friendly",
)

_CASTS = {
    "float": "torch.float32",
    "double": "torch.float64",
    "half": "torch.float16",
    "bfloat16": "torch.bfloat16",
    "long": "torch.int64",
    "int": "torch.int32",
    "bool": "torch.bool",
}


class Trace:
    """What all frames of one evaluation share.

    Attributes:
        scope: the module's names.
        calls: the opaque calls, in the order of evaluation.
        loops: the number of loops that have been entered.
    """

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.calls: list[Node] = []
        self.loops = 0
        self._serials: Counter[bytes] = Counter()

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


@dataclass(slots=True)
class Arguments:
    """The evaluated arguments of a call."""

    positional: list[Node]
    keywords: dict[str, Node]

    @property
    def plain(self) -> bool:
        """Whether there are no ``*`` and ``**`` arguments."""
        return "**" not in self.keywords and all(node.op != "star" for node in self.positional)


def call(node: ast.Call, frame: Frame[Node], trace: Trace) -> Node:
    """The value of a call."""
    function = node.func
    parent = _method(frame.home, super_name(function), trace, above=True)
    receiver = None
    if isinstance(function, ast.Attribute) and parent is None:
        receiver = evaluate(function.value, frame)
        callee = attribute(receiver, function, frame)
    else:
        callee = Node("global", (), "builtins.super") if parent else evaluate(function, frame)
    arguments = _arguments(node, frame)
    if "out" in arguments.keywords:
        raise UnclearError("out= writes to a tensor", node, writes=True)
    result = None
    if parent is not None:
        result = _followed(parent, arguments, frame, trace)
    elif callee.op == "global":
        result = _call_global(node, str(callee.value), arguments, frame, trace)
    elif isinstance(function, ast.Attribute) and receiver is not None:
        if receiver.op != "self":
            result = _call_method(node, function, receiver, arguments, frame, trace)
        elif callee == Node("attribute", (), function.attr):
            method = _method(frame.owner, function.attr, trace)
            result = _followed(method, arguments, frame, trace) if method is not None else None
    if result is None:
        return _unknown_call(node, callee, arguments, trace)
    if result.origin is not node:
        facts, result = result.facts, result.at(node)
        result.facts.update((fact, None) for fact in ("followed", "own") if fact in facts)
    return result


def attribute(base: Node, node: ast.Attribute, frame: Frame[Node]) -> Node:
    """``base.<name>``."""
    name = node.attr
    value = None
    if base.op == "global" and base.value not in DTYPES.values():
        path = f"{base.value}.{name}"
        value = Node("global", (), DTYPES.get(path, path), node)
    elif base.op == "self":
        value = frame.values.get(f"self.{name}") or Node("attribute", (), name, node)
    elif name == "dtype":
        value = dtype_of(base)
    elif name == "shape":
        value = normal_forms.shape(base, node)
    elif name in ("ndim", "device"):
        value = Node(name, (base,), None, node)
    elif base.op == "attribute":
        value = Node("attribute", (), f"{base.value}.{name}", node)
    return value if value is not None else Node("getattr", (base,), name, node)


def _arguments(node: ast.Call, frame: Frame[Node]) -> Arguments:
    positional: list[Node] = []
    for argument in node.args:
        if isinstance(argument, ast.Starred):
            value = evaluate(argument.value, frame)
            positional.extend(value.args if value.op == "tuple" else (Node("star", (value,)),))
        else:
            positional.append(evaluate(argument, frame))
    keywords: dict[str, Node] = {}
    for keyword in node.keywords:
        value = evaluate(keyword.value, frame)
        if keyword.arg is None and "**" in keywords:
            raise UnclearError("** twice in one call", node)
        keywords[keyword.arg or "**"] = value
    return Arguments(positional, keywords)


def _call_global(
    node: ast.Call, path: str, arguments: Arguments, frame: Frame[Node], trace: Trace
) -> Node | None:
    operation = operations.function(path)
    if operation is not None and arguments.plain:
        result = _operation(node, operation, arguments, from_method=path.startswith("torch.Tensor."))
        if result is not None:
            return result
    if path.startswith(":") and (function := trace.scope.functions.get(path[1:])) is not None:
        return _followed((function, None, False), arguments, frame, trace)
    package, _, name = path.rpartition(".")
    if package != "builtins" or arguments.keywords or not arguments.plain or not arguments.positional:
        return None
    return _call_builtin(node, name, arguments.positional)


def _call_builtin(node: ast.Call, name: str, arguments: list[Node]) -> Node | None:
    first = arguments[0]
    if name == "getattr" and len(arguments) == 2 and first.op in ("self", "attribute"):
        wanted = arguments[1]
        if wanted.op == "constant" and isinstance(wanted.value, str):
            prefix = f"{first.value}." if first.op == "attribute" else ""
            return Node("attribute", (), f"{prefix}{wanted.value}", node)
    elif len(arguments) != 1:
        return None
    elif name == "int" and is_number(first):
        whole = first.op in ("size", "ndim", "floordiv", "len")
        return first if whole else Node("int", (first,), None, node)
    elif name in ("tuple", "list") and first.op in ("tuple", "shape", "part"):
        return first
    elif name == "len":
        return (
            Node("ndim", first.args, None, node) if first.op == "shape" else Node("len", (first,), None, node)
        )
    return None


def _call_method(
    node: ast.Call,
    function: ast.Attribute,
    receiver: Node,
    arguments: Arguments,
    frame: Frame[Node],
    trace: Trace,
) -> Node | None:
    """The result of a tensor's method; None if the method is unknown."""
    name = function.attr
    if name.startswith("__i") and name.endswith("__"):
        raise UnclearError(f"{name} changes a tensor in place", node, writes=True)
    if name.endswith("_") and not name.endswith("__"):
        return _call_in_place(node, function, receiver, arguments, frame, trace)
    if name in ("to", "type", "type_as", *_CASTS):
        return _to(node, name, receiver, arguments)
    operation = operations.method(name)
    if operation is None or receiver.op in ("tuple", "dict", "shape"):
        return None
    if name == "view" and any(map(is_dtype, (*arguments.positional, *arguments.keywords.values()))):
        return None  # reinterprets the bits as another dtype
    if "**" in arguments.keywords or (operation.variadic is None and not arguments.plain):
        return None
    operands = Arguments([receiver, *arguments.positional], arguments.keywords)
    return _operation(node, operation, operands, from_method=True)


def _call_in_place(
    node: ast.Call,
    function: ast.Attribute,
    receiver: Node,
    arguments: Arguments,
    frame: Frame[Node],
    trace: Trace,
) -> Node:
    name = function.attr[:-1]
    operation = operations.method(name)
    result = None
    if operation is not None and arguments.plain:
        operands = Arguments([receiver, *arguments.positional], arguments.keywords)
        result = _operation(node, operation, operands, from_method=True)
    if result is None:
        result = _unknown_call(node, Node("getattr", (receiver,), name), arguments, trace)
    return write(function.value, receiver, normal_forms.updated(receiver, result), frame)


def _to(node: ast.Call, name: str, receiver: Node, arguments: Arguments) -> Node | None:
    positional, keywords = arguments.positional, dict(arguments.keywords)
    for flag in ("non_blocking", "copy"):
        keywords.pop(flag, None)
    if name in _CASTS:
        alone = not positional and not keywords
        return normal_forms.cast(receiver, named_dtype(_CASTS[name]), node) if alone else None
    if name == "type_as":
        other = positional[0] if positional else keywords.get("other")
        dtype = None if other is None else dtype_of(other)
        return None if dtype is None else normal_forms.cast(receiver, dtype, node)
    if not set(keywords) <= {"dtype", "device", "other"} or not (positional or keywords):
        return None
    result: Node | None = receiver
    for value in [*positional, *keywords.values()]:
        if result is not None:
            result = _moved(node, result, value, keywords)
    return result


def _moved(node: ast.Call, tensor: Node, value: Node, keywords: Mapping[str, Node]) -> Node | None:
    """Apply one argument of ``Tensor.to``: a dtype, a device, or a tensor that has both."""
    if is_dtype(value) or keywords.get("dtype") is value:
        return tensor if value == constant(None) else normal_forms.cast(tensor, value, node)
    named = value.op == "constant" and isinstance(value.value, str)
    if named or value.op == "device" or keywords.get("device") is value:
        return Node("to_device", (tensor, value), None, node)
    if value.op in ("cast", "mul", "add", "sub", "linear", "mean", "rsqrt"):
        dtype = dtype_of(value)
        cast = tensor if dtype is None else normal_forms.cast(tensor, dtype)
        return Node("to_device", (cast, Node("device", (value,))), None, node)
    return None


def _operation(
    node: ast.Call, operation: Operation, arguments: Arguments, *, from_method: bool
) -> Node | None:
    """The node of a known operation; None if the arguments do not fit its parameters."""
    operands = _operands(operation, arguments, from_method=from_method)
    if operands is None:
        return None
    if not is_constant(operands.pop("inplace", constant(value=False)), value=False):
        raise UnclearError("inplace= changes a tensor in place", node, writes=True)
    args = [value for name, value in operands.items() if not name.startswith("_")]
    return normal_form(operation.name, args, node)


def _operands(operation: Operation, arguments: Arguments, *, from_method: bool) -> dict[str, Node] | None:
    """The operand for each parameter, in order; None if the arguments do not fit."""
    positional = arguments.positional
    names = operation.parameters
    if from_method and operation.variadic is not None:
        head, rest = positional[: operation.variadic], positional[operation.variadic :]
        if rest:
            positional = [*head, _sequence(rest)]
    if len(positional) > len(names):
        return None
    bound: dict[str, Node] = dict(zip(names, positional, strict=False))
    for keyword, value in arguments.keywords.items():
        # numpy's names, which reductions accept as well
        name = {"axis": "dim", "keepdims": "keepdim"}.get(keyword, keyword)
        if name not in names or name in bound:
            return None
        bound[name] = value
    for name, default in zip(names, operation.defaults, strict=True):
        if name not in bound:
            if default is None:
                return None
            literal = ast.literal_eval(default)
            bound[name] = Node("tuple") if literal == () else constant(literal)
    return {name: bound[name] for name in names}


def _sequence(arguments: list[Node]) -> Node:
    """The sequence that a variadic parameter gets: one sequence, or separate arguments."""
    if len(arguments) == 1:
        (only,) = arguments
        if only.op == "star":
            return only.args[0]
        if only.op in ("tuple", "shape", "part", "argument", "attribute"):
            return only
    return Node("tuple", tuple(arguments))


def _unknown_call(node: ast.Call, callee: Node, arguments: Arguments, trace: Trace) -> Node:
    positional, keywords = arguments.positional, arguments.keywords
    if not is_constant(keywords.get("inplace", constant(value=False)), value=False):
        raise UnclearError("inplace= changes a tensor in place", node, writes=True)
    path = str(callee.value) if callee.op == "global" else ""
    if path.startswith("torch.nn.functional.") and constant(value=True) in positional:
        raise UnclearError(f"{path} may change its argument in place", node, writes=True)
    names = tuple(sorted(keywords))
    args = (callee, *positional, *(keywords[name] for name in names))
    if operations.is_pure(path):
        return Node("call", args, (len(positional), names, 0), node)
    if path.endswith("_") and not path.endswith("__"):
        raise UnclearError(f"{path} changes its argument in place", node, writes=True)
    return trace.opaque(args, names, node)


def _method(owner: ast.ClassDef | None, name: str, trace: Trace, *, above: bool = False) -> Callee | None:
    """A method of ``self`` whose class is ``owner``, or, with ``above``, of ``super()`` in that class."""
    method = trace.scope.method(owner, name, above=above) if owner is not None and name else None
    return (*method, True) if method is not None else None


def _followed(callee: Callee, arguments: Arguments, frame: Frame[Node], trace: Trace) -> Node | None:
    """The result of a call of a function of this file; None if the call is not followed.

    Raises:
        UnclearError: the function changes an argument in place.
    """
    function, home, on_self = callee
    decorators = [decorator_name(decorator) for decorator in function.decorator_list]
    if (
        isinstance(function, ast.AsyncFunctionDef)
        or not arguments.plain
        or frame.depth >= _MOST_CALLS
        or any(name not in HARMLESS_DECORATORS for name in decorators)
    ):
        return None
    on_instance = on_self and "staticmethod" not in decorators
    positional = [Node("self"), *arguments.positional] if on_instance else arguments.positional
    values = _parameter_values(function, positional, arguments.keywords)
    if values is None:
        return None
    inner = Frame(frame.domain, values, local_names(function), frame.depth + 1)
    inner.effects = frame.effects
    inner.borrowed = frozenset(root for value in values.values() for root in roots(value))
    if on_self:
        inner.owner, inner.home = frame.owner, home
        inner.values.update(_attributes(frame))
    calls, effects = len(trace.calls), len(frame.effects)
    try:
        result = run(function.body, inner)
    except UnclearError as error:
        # A call that is not followed becomes an unknown call, unless it may have changed known values.
        if error.writes:
            raise
        del trace.calls[calls:], frame.effects[effects:]
        return None
    if on_self:
        frame.values.update(_attributes(inner))
    if result is not None and result.op == "raise":
        return None
    frame.domain.followed[f"{home.name}.{function.name}" if home is not None else function.name] = None
    value = Node("constant") if result is None else Node(result.op, result.args, result.value)
    value.facts["followed"] = None
    return value


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
