"""Calls as nodes: torch operations, functions and methods of the same file, unknown code."""

from __future__ import annotations

import ast
from collections.abc import Mapping

from veomni_hook.patches.graph import arithmetic, indexing, torch_operations
from veomni_hook.patches.graph.dtypes import dtype_of, is_dtype, is_number, named_dtype
from veomni_hook.patches.graph.interpreter.inline import Arguments, followed, own_method, super_method
from veomni_hook.patches.graph.interpreter.memory import write
from veomni_hook.patches.graph.interpreter.state import Frame, UnclearError
from veomni_hook.patches.graph.nodes import Node, constant, is_constant
from veomni_hook.patches.graph.normal_forms import normal_form
from veomni_hook.patches.graph.torch_operations import DTYPES, Operation

__all__ = ["attribute", "call"]

_CASTS = {
    "float": "torch.float32",
    "double": "torch.float64",
    "half": "torch.float16",
    "bfloat16": "torch.bfloat16",
    "long": "torch.int64",
    "int": "torch.int32",
    "bool": "torch.bool",
}


def call(node: ast.Call, frame: Frame) -> Node:
    """The value of a call."""
    function, evaluate = node.func, frame.trace.evaluate
    parent = super_method(function, frame)
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
        result = followed(parent, arguments, frame)
    elif callee.op == "global":
        result = _call_global(node, str(callee.value), arguments, frame)
    elif isinstance(function, ast.Attribute) and receiver is not None:
        if receiver.op != "self":
            result = _call_method(node, function, receiver, arguments, frame)
        elif callee == Node("attribute", (), function.attr):
            method = own_method(function.attr, frame)
            result = followed(method, arguments, frame) if method is not None else None
    if result is None:
        return _unknown_call(node, callee, arguments, frame)
    if result.origin is not node:
        facts, result = result.facts, result.at(node)
        result.facts.update((fact, None) for fact in ("followed", "own") if fact in facts)
    return result


def attribute(base: Node, node: ast.Attribute, frame: Frame) -> Node:
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
        value = indexing.shape(base, node)
    elif name in ("ndim", "device"):
        value = Node(name, (base,), None, node)
    elif base.op == "attribute":
        value = Node("attribute", (), f"{base.value}.{name}", node)
    return value if value is not None else Node("getattr", (base,), name, node)


def _arguments(node: ast.Call, frame: Frame) -> Arguments:
    evaluate = frame.trace.evaluate
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


def _call_global(node: ast.Call, path: str, arguments: Arguments, frame: Frame) -> Node | None:
    operation = torch_operations.function(path)
    if operation is not None and arguments.plain:
        result = _operation(node, operation, arguments, from_method=path.startswith("torch.Tensor."))
        if result is not None:
            return result
    if path.startswith(":") and (function := frame.trace.scope.functions.get(path[1:])) is not None:
        return followed((function, None, False), arguments, frame)
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
    node: ast.Call, function: ast.Attribute, receiver: Node, arguments: Arguments, frame: Frame
) -> Node | None:
    """The result of a tensor's method; None if the method is unknown."""
    name = function.attr
    if name.startswith("__i") and name.endswith("__"):
        raise UnclearError(f"{name} changes a tensor in place", node, writes=True)
    if name.endswith("_") and not name.endswith("__"):
        return _call_in_place(node, function, receiver, arguments, frame)
    if name in ("to", "type", "type_as", *_CASTS):
        return _to(node, name, receiver, arguments)
    operation = torch_operations.method(name)
    if operation is None or receiver.op in ("tuple", "dict", "shape"):
        return None
    if name == "view" and any(map(is_dtype, (*arguments.positional, *arguments.keywords.values()))):
        return None  # reinterprets the bits as another dtype
    if "**" in arguments.keywords or (operation.variadic is None and not arguments.plain):
        return None
    operands = Arguments([receiver, *arguments.positional], arguments.keywords)
    return _operation(node, operation, operands, from_method=True)


def _call_in_place(
    node: ast.Call, function: ast.Attribute, receiver: Node, arguments: Arguments, frame: Frame
) -> Node:
    name = function.attr[:-1]
    operation = torch_operations.method(name)
    result = None
    if operation is not None and arguments.plain:
        operands = Arguments([receiver, *arguments.positional], arguments.keywords)
        result = _operation(node, operation, operands, from_method=True)
    if result is None:
        result = _unknown_call(node, Node("getattr", (receiver,), name), arguments, frame)
    return write(function.value, receiver, arithmetic.updated(receiver, result), frame)


def _to(node: ast.Call, name: str, receiver: Node, arguments: Arguments) -> Node | None:
    positional, keywords = arguments.positional, dict(arguments.keywords)
    for flag in ("non_blocking", "copy"):
        keywords.pop(flag, None)
    if name in _CASTS:
        alone = not positional and not keywords
        return arithmetic.cast(receiver, named_dtype(_CASTS[name]), node) if alone else None
    if name == "type_as":
        other = positional[0] if positional else keywords.get("other")
        dtype = None if other is None else dtype_of(other)
        return None if dtype is None else arithmetic.cast(receiver, dtype, node)
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
        return tensor if value == constant(None) else arithmetic.cast(tensor, value, node)
    named = value.op == "constant" and isinstance(value.value, str)
    if named or value.op == "device" or keywords.get("device") is value:
        return Node("to_device", (tensor, value), None, node)
    if value.op in ("cast", "mul", "add", "sub", "linear", "mean", "rsqrt"):
        dtype = dtype_of(value)
        cast = tensor if dtype is None else arithmetic.cast(tensor, dtype)
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


def _unknown_call(node: ast.Call, callee: Node, arguments: Arguments, frame: Frame) -> Node:
    positional, keywords = arguments.positional, arguments.keywords
    if not is_constant(keywords.get("inplace", constant(value=False)), value=False):
        raise UnclearError("inplace= changes a tensor in place", node, writes=True)
    path = str(callee.value) if callee.op == "global" else ""
    if path.startswith("torch.nn.functional.") and constant(value=True) in positional:
        raise UnclearError(f"{path} may change its argument in place", node, writes=True)
    names = tuple(sorted(keywords))
    args = (callee, *positional, *(keywords[name] for name in names))
    if torch_operations.is_pure(path):
        return Node("call", args, (len(positional), names, 0), node)
    if path.endswith("_") and not path.endswith("__"):
        raise UnclearError(f"{path} changes its argument in place", node, writes=True)
    return frame.trace.opaque(args, names, node)
