"""Convert calls to nodes: torch operations, functions and methods of the same file, unknown code."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from veomni_hook.patches.graph import arithmetic, indexing
from veomni_hook.patches.graph import torch_operations as operations
from veomni_hook.patches.graph.dtypes import dtype, dtype_of, is_dtype, is_number
from veomni_hook.patches.graph.nodes import Node, constant, is_constant
from veomni_hook.patches.graph.normal_forms import normal
from veomni_hook.patches.graph.torch_operations import DTYPES, Operation
from veomni_hook.patches.graph.interpreter.state import Frame, Trace, UnclearError, fresh, roots
from veomni_hook.patches.text.document import FunctionNode

__all__ = ["Arguments", "Evaluate", "attribute", "call", "write"]

Evaluate = Callable[[ast.expr, Frame, Trace], Node]
#: A function, the class that defines it, and whether it is called on ``self``.
Callee: TypeAlias = tuple[FunctionNode, ast.ClassDef | None, bool]

_CASTS = {
    "float": "torch.float32",
    "double": "torch.float64",
    "half": "torch.float16",
    "bfloat16": "torch.bfloat16",
    "long": "torch.int64",
    "int": "torch.int32",
    "bool": "torch.bool",
}


@dataclass(slots=True)
class Arguments:
    """The evaluated arguments of a call."""

    positional: list[Node]
    keywords: dict[str, Node]

    @property
    def plain(self) -> bool:
        """Whether there are no ``*`` and ``**`` arguments."""
        return "**" not in self.keywords and all(node.op != "star" for node in self.positional)


def call(node: ast.Call, frame: Frame, trace: Trace, evaluate: Evaluate) -> Node:
    """The value of a call."""
    from veomni_hook.patches.graph.interpreter.inline import followed, super_method

    function = node.func
    parent = super_method(function, frame, trace)
    receiver = None
    if isinstance(function, ast.Attribute) and parent is None:
        receiver = evaluate(function.value, frame, trace)
        callee = attribute(receiver, function, frame)
    else:
        callee = Node("global", (), "builtins.super") if parent else evaluate(function, frame, trace)
    arguments = _arguments(node, frame, trace, evaluate)
    if "out" in arguments.keywords:
        raise UnclearError("out= writes to a tensor", node, writes=True)
    made = None
    if parent is not None:
        made = followed(parent, arguments, frame, trace)
    elif callee.op == "global":
        made = _global(node, str(callee.value), arguments, (frame, trace))
    elif receiver is not None and receiver.op == "self":
        method = _own_method(callee, function, frame, trace)
        made = followed(method, arguments, frame, trace) if method is not None else None
    elif receiver is not None:
        made = _method(node, receiver, arguments, (frame, trace))
    if made is None:
        return _unknown(node, callee, arguments, trace)
    if made.origin is not node:
        facts, made = made.facts, made.at(node)
        made.facts.update((fact, None) for fact in ("followed", "own") if fact in facts)
    return made


def _own_method(callee: Node, function: ast.expr, frame: Frame, trace: Trace) -> Callee | None:
    name = function.attr if isinstance(function, ast.Attribute) else ""
    if frame.owner is None or callee != Node("attribute", (), name):
        return None
    found = trace.scope.method(frame.owner, name)
    return (*found, True) if found is not None else None


def attribute(base: Node, node: ast.Attribute, frame: Frame) -> Node:
    """``base.<name>``."""
    name = node.attr
    made = None
    if base.op == "global" and base.value not in DTYPES.values():
        path = f"{base.value}.{name}"
        made = Node("global", (), DTYPES.get(path, path), node)
    elif base.op == "self":
        made = frame.values.get(f"self.{name}") or Node("attribute", (), name, node)
    elif name == "dtype":
        made = dtype_of(base)
    elif name == "shape":
        made = indexing.shape(base, node)
    elif name in ("ndim", "device"):
        made = Node(name, (base,), None, node)
    elif base.op == "attribute":
        made = Node("attribute", (), f"{base.value}.{name}", node)
    return made if made is not None else Node("getattr", (base,), name, node)


def _arguments(node: ast.Call, frame: Frame, trace: Trace, evaluate: Evaluate) -> Arguments:
    positional: list[Node] = []
    for argument in node.args:
        if isinstance(argument, ast.Starred):
            value = evaluate(argument.value, frame, trace)
            positional.extend(value.args if value.op == "tuple" else (Node("star", (value,)),))
        else:
            positional.append(evaluate(argument, frame, trace))
    keywords: dict[str, Node] = {}
    for keyword in node.keywords:
        value = evaluate(keyword.value, frame, trace)
        if keyword.arg is None and "**" in keywords:
            raise UnclearError("** twice in one call", node)
        keywords[keyword.arg or "**"] = value
    return Arguments(positional, keywords)


def _global(node: ast.Call, path: str, arguments: Arguments, place: tuple[Frame, Trace]) -> Node | None:
    from veomni_hook.patches.graph.interpreter.inline import followed

    frame, trace = place
    operation = operations.function(path)
    if operation is not None and arguments.plain:
        made = _operation(node, operation, arguments, from_method=path.startswith("torch.Tensor."))
        if made is not None:
            return made
    if path.startswith(":") and (function := trace.scope.functions.get(path[1:])) is not None:
        return followed((function, None, False), arguments, frame, trace)
    return _builtin(node, path, arguments)


def _builtin(node: ast.Call, path: str, arguments: Arguments) -> Node | None:
    package, _, name = path.rpartition(".")
    given = arguments.positional
    if package != "builtins" or arguments.keywords or not arguments.plain or not given:
        return None
    first, made = given[0], None
    if (
        name == "getattr"
        and len(given) == 2
        and isinstance(given[1].value, str)
        and given[1].op == "constant"
    ):
        if first.op in ("self", "attribute"):
            prefix = f"{first.value}." if first.op == "attribute" else ""
            made = Node("attribute", (), f"{prefix}{given[1].value}", node)
    elif len(given) != 1:
        made = None
    elif name == "int" and is_number(first):
        whole = first.op in ("size", "ndim", "floordiv", "len")
        made = first if whole else Node("int", (first,), None, node)
    elif name in ("tuple", "list") and first.op in ("tuple", "shape", "part"):
        made = first
    elif name == "len":
        made = (
            Node("ndim", first.args, None, node) if first.op == "shape" else Node("len", (first,), None, node)
        )
    return made


def _method(node: ast.Call, receiver: Node, arguments: Arguments, place: tuple[Frame, Trace]) -> Node | None:
    """The result of a tensor's method; None if the method is unknown."""
    function = node.func
    assert isinstance(function, ast.Attribute)  # noqa: S101
    name = function.attr
    if name.startswith("__i") and name.endswith("__"):
        raise UnclearError(f"{name} changes a tensor in place", node, writes=True)
    if name.endswith("_") and not name.endswith("__"):
        return _in_place(node, name[:-1], receiver, arguments, place)
    if name in ("to", "type", "type_as", *_CASTS):
        return _to(node, name, receiver, arguments)
    operation = operations.method(name)
    if operation is None or receiver.op in ("tuple", "dict", "shape"):
        return None
    if name == "view" and any(map(is_dtype, (*arguments.positional, *arguments.keywords.values()))):
        return None  # reinterprets the bits as another dtype
    if "**" in arguments.keywords or (operation.variadic is None and not arguments.plain):
        return None
    given = Arguments([receiver, *arguments.positional], arguments.keywords)
    return _operation(node, operation, given, from_method=True)


def _in_place(
    node: ast.Call, name: str, receiver: Node, arguments: Arguments, place: tuple[Frame, Trace]
) -> Node:
    frame, trace = place
    function = node.func
    assert isinstance(function, ast.Attribute)  # noqa: S101
    operation = operations.method(name)
    made = None
    if operation is not None and arguments.plain:
        given = Arguments([receiver, *arguments.positional], arguments.keywords)
        made = _operation(node, operation, given, from_method=True)
    if made is None:
        callee = Node("getattr", (receiver,), name)
        made = _unknown(node, callee, arguments, trace)
    return write(function.value, receiver, arithmetic.updated(receiver, made), frame, trace)


def write(target: ast.expr, old: Node, new: Node, frame: Frame, trace: Trace) -> Node:
    """Record an in-place change of a tensor: from here on its name holds ``new``.

    Raises:
        UnclearError: the tensor may share memory with an argument, an attribute or another name's value.
    """
    if not fresh(old) or not frame.borrowed.isdisjoint(roots(old)):
        raise UnclearError("a tensor that is not the function's own is changed in place", target, writes=True)
    trace.changes += 1
    new.facts["own"] = None
    names = frame.holders(old)
    if isinstance(target, ast.Name) and names == [target.id]:
        frame.values[target.id] = new
    elif names:
        raise UnclearError(
            f"a tensor that {', '.join(names)} may share is changed in place", target, writes=True
        )
    return new


def _to(node: ast.Call, name: str, receiver: Node, arguments: Arguments) -> Node | None:
    given, keywords = arguments.positional, dict(arguments.keywords)
    for flag in ("non_blocking", "copy"):
        keywords.pop(flag, None)
    if name in _CASTS:
        return arithmetic.cast(receiver, dtype(_CASTS[name]), node) if not given and not keywords else None
    if name == "type_as":
        other = given[0] if given else keywords.get("other")
        to = None if other is None else dtype_of(other)
        return None if to is None else arithmetic.cast(receiver, to, node)
    if not set(keywords) <= {"dtype", "device", "other"} or not (given or keywords):
        return None
    made = receiver
    for value in [*given, *keywords.values()]:
        moved = _moved(node, made, value, keywords)
        if moved is None:
            return None
        made = moved
    return made


def _moved(node: ast.Call, receiver: Node, value: Node, keywords: Mapping[str, Node]) -> Node | None:
    """Apply one argument of ``Tensor.to``: a dtype, a device, or a tensor that has both."""
    if is_dtype(value) or keywords.get("dtype") is value:
        return receiver if value == constant(None) else arithmetic.cast(receiver, value, node)
    named = value.op == "constant" and isinstance(value.value, str)
    if named or value.op == "device" or keywords.get("device") is value:
        return Node("to_device", (receiver, value), None, node)
    if value.op in ("cast", "mul", "add", "sub", "linear", "mean", "rsqrt"):
        to = dtype_of(value)
        moved = receiver if to is None else arithmetic.cast(receiver, to)
        return Node("to_device", (moved, Node("device", (value,))), None, node)
    return None


def _operation(node: ast.Call, operation: Operation, given: Arguments, *, from_method: bool) -> Node | None:
    """The node of a known operation; None if the arguments do not fit its parameters."""
    bound = _bound(operation, given, from_method=from_method)
    if bound is None:
        return None
    if not is_constant(bound.pop("inplace", constant(value=False)), value=False):
        raise UnclearError("inplace= changes a tensor in place", node, writes=True)
    args = [value for name, value in bound.items() if not name.startswith("_")]
    return normal(operation.name, args, node)


def _bound(operation: Operation, given: Arguments, *, from_method: bool) -> dict[str, Node] | None:
    positional = list(given.positional)
    names = operation.parameters
    if from_method and operation.variadic is not None:
        head, rest = positional[: operation.variadic], positional[operation.variadic :]
        if rest:
            only = rest[0] if len(rest) == 1 else None
            whole = only is not None and only.op in ("tuple", "shape", "part", "argument", "attribute")
            if only is not None and only.op == "star":
                only, whole = only.args[0], True
            positional = [*head, only if whole and only is not None else Node("tuple", tuple(rest))]
    if len(positional) > len(names):
        return None
    bound: dict[str, Node] = dict(zip(names, positional, strict=False))
    for keyword, value in given.keywords.items():
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


def _unknown(node: ast.Call, callee: Node, arguments: Arguments, trace: Trace) -> Node:
    if not is_constant(arguments.keywords.get("inplace", constant(value=False)), value=False):
        raise UnclearError("inplace= changes a tensor in place", node, writes=True)
    in_functional = callee.op == "global" and str(callee.value).startswith("torch.nn.functional.")
    if in_functional and constant(value=True) in arguments.positional:
        raise UnclearError(f"{callee.value} may change its argument in place", node, writes=True)
    names = tuple(sorted(arguments.keywords))
    args = (callee, *arguments.positional, *(arguments.keywords[name] for name in names))
    if callee.op == "global" and operations.is_pure(str(callee.value)):
        return Node("call", args, (len(arguments.positional), names, 0), node)
    if callee.op == "global" and str(callee.value).endswith("_") and not str(callee.value).endswith("__"):
        raise UnclearError(f"{callee.value} changes its argument in place", node, writes=True)
    return trace.opaque(Node("call", args, names, node), names)
