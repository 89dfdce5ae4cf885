"""Calls in layer code: functions and modules of the file, torch's, and attention."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import replace
from functools import reduce

from veomni_hook.patches.code.tree import chain, decorator_name, last_name
from veomni_hook.patches.idioms.layer_loop.attention import STATE, attended, convolved, of_cache, ruled
from veomni_hook.patches.idioms.layer_loop.file import File
from veomni_hook.patches.idioms.layer_loop.known_names import (
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
from veomni_hook.patches.idioms.layer_loop.operations import operation, torch_name
from veomni_hook.patches.idioms.layer_loop.values import (
    BATCH,
    EMPTY,
    NOTHING,
    PLAIN,
    POSITIONS,
    SLICE,
    Arguments,
    Attention,
    Items,
    Many,
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
    bare,
    fresh,
    is_positional,
    joined,
    of_all,
    read_from,
    tensor_like,
    used,
)
from veomni_hook.patches.idioms.varlen_attention import read
from veomni_hook.patches.interpreter.domain import Frame
from veomni_hook.patches.interpreter.walk import bound, evaluate, run, super_name
from veomni_hook.patches.site import Code, Missed

__all__ = ["call"]

_DEPTH = 40
_CAST = "torch.amp.autocast_mode._cast"
#: Where the arguments begin that ``apply_chunking_to_forward`` passes on.
_CHUNKED = 3
#: What a mask of padding has: a number for each position.
_OF_POSITIONS = Tensor(((BATCH,), (POSITIONS,)))


def call(node: ast.Call, frame: Frame[Value], file: File) -> Value:
    """The result of a call.

    Raises:
        Missed: it moves or mixes positions, or cannot be followed.
    """
    start = file.view.document.start(node.func)
    if start in file.convolutions:
        return convolved(node, _arguments(node, frame), file)
    if start in file.rules:
        return ruled(node, _arguments(node, frame), file)
    try:
        return _call(node, frame, file)
    except Missed:
        if not (masks := _masks(node, frame, file)):
            raise
    # As upstream's function that zeroes what is padded: it needs the mask of the same positions.
    values = {**frame.values, **{mask.id: _OF_POSITIONS for mask in masks}}
    result = _call(node, frame.fork(values), file)
    file.masks.update({id(mask): mask for mask in masks})
    return result


def _masks(node: ast.Call, frame: Frame[Value], file: File) -> list[ast.Name]:
    """The masks that a method passes to a function of the file."""
    if not isinstance(frame.values.get("self"), Own) or not isinstance(node.func, ast.Name):
        return []
    if node.func.id not in file.view.scope.functions or node.func.id in frame.values:
        return []
    passed = [*node.args, *(keyword.value for keyword in node.keywords)]
    names = [argument for argument in passed if isinstance(argument, ast.Name)]
    values = [(name, bare(frame.values.get(name.id, PLAIN))) for name in names]
    return [name for name, value in values if isinstance(value, Whole) and "mask" in value.name]


def _call(node: ast.Call, frame: Frame[Value], file: File) -> Value:
    if super_name(node.func):
        return _above(node, frame, file)
    if chain(node.func) == f"{INTERFACE}.get_interface":
        return Attention()
    dotted = file.view.scope.dotted(node.func) if not _is_local(node.func, frame) else ""
    arguments = _arguments(node, frame)
    known = _known(dotted, arguments, node)
    if known is not None:
        return known
    function = evaluate(node.func, frame)
    if dotted.endswith("apply_chunking_to_forward") and len(arguments.given) > _CHUNKED:
        function, arguments = arguments.given[0], Arguments(arguments.given[_CHUNKED:])
    return _called(function, arguments, node, frame, file)


def _known(dotted: str, arguments: Arguments, node: ast.Call) -> Value | None:
    """The result of a function that is known by its name; None for others."""
    if dotted.startswith("builtins."):
        return _builtin(dotted.rpartition(".")[2], [*arguments.given, *arguments.named.values()], node)
    if name := torch_name(dotted):
        return _torch(name, arguments, node)
    if dotted.startswith("torch.nn.") and dotted.rpartition(".")[2][:1].isupper():
        return Module((dotted,), node)
    if dotted.partition(".")[0] in (":logger", "warnings"):
        return PLAIN
    return arguments.given[0] if dotted == _CAST and arguments.given else None


def _is_local(function: ast.expr, frame: Frame[Value]) -> bool:
    while isinstance(function, ast.Attribute):
        function = function.value
    return isinstance(function, ast.Name) and function.id in frame.values


def _arguments(node: ast.Call, frame: Frame[Value]) -> Arguments:
    """The arguments of a call."""
    given: list[Value] = []
    for argument in node.args:
        value = evaluate(argument, frame)
        if not isinstance(argument, ast.Starred):
            given.append(value)
        elif isinstance(value, Items):
            given += value.values
        elif not isinstance(value, Whole):
            raise Missed("arguments of unknown number", node)
    named: dict[str, Value] = {}
    bag = None
    for keyword in node.keywords:
        value = evaluate(keyword.value, frame)
        if keyword.arg is not None:
            named[keyword.arg] = value
        elif isinstance(value, Whole):
            bag = value
            named.update(value.held)
        elif not (isinstance(value, Many | Plain) and not _holds_tensor(value)):
            raise Missed("keyword arguments that are not known", node)
    return Arguments(tuple(given), named, bag)


def _called(function: Value, arguments: Arguments, node: ast.Call, frame: Frame[Value], file: File) -> Value:
    """The result of a call of a value."""
    function = bare(function)
    if isinstance(function, Attention):
        if file.tower:
            raise Missed("its attention is not split at boundaries", node, Code.NO_BOUNDARIES)
        return attended(arguments, node)
    if isinstance(function, Method):
        return _followed(function, arguments, node, frame, file)
    if isinstance(function, Module):
        results = [_module(name, function.made, arguments, node, frame, file) for name in function.names]
        return reduce(joined, results)
    if isinstance(function, Operation):
        return _operation(function, arguments, node)
    if isinstance(function, Items):
        value = arguments.first
        for part in function.values:
            value = _called(part, Arguments((value,)), node, frame, file)
        return value
    return _elsewhere(function, arguments, node)


def _elsewhere(function: Value, arguments: Arguments, node: ast.Call) -> Value:
    """A function of another file: it must not get a part of the positions."""
    if isinstance(function, Unknown):
        raise Missed(f"it calls {function.reason}", node)
    for value in arguments.every:
        if isinstance(value, Tensor):
            raise Missed(f"it calls {ast.unparse(node.func)}, which is not followed", node)
        if isinstance(value, Size):
            tensor_like(value, node)
    return next((value for value in arguments.every if isinstance(value, Whole | Unknown)), PLAIN)


def _builtin(name: str, given: list[Value], node: ast.Call) -> Value:
    first = given[0] if given else PLAIN
    if name == "isinstance" and isinstance(first, Tensor) and last_name(node.args[1]) == "tuple":
        return Plain(False)
    if name in (*QUESTIONS, "tuple", "list"):
        return PLAIN if name in QUESTIONS else first
    if name in _LISTS:
        return _LISTS[name](given, node)
    if name not in (*NUMBERS, *LOOPS, "getattr", "slice"):
        raise Missed(f"it calls {name}, which is not followed", node)
    for value in given if name == "slice" else of_all(given):
        if isinstance(value, Whole) and name == "getattr":
            return value
        if isinstance(tensor_like(value, node), Tensor):
            raise Missed(f"{name} of values of some positions", node, Code.MIXES_POSITIONS)
    kept = first if name in LOOPS and isinstance(first, Items | Many) else PLAIN
    return SLICE if name == "slice" else kept


def _length(given: list[Value], node: ast.AST) -> Value:
    """What ``len`` gives."""
    if isinstance(given[0], Tensor):
        return Size(given[0].dims[0])
    return Plain(len(given[0].values)) if isinstance(given[0], Items) else PLAIN


def _numbered(given: list[Value], node: ast.AST) -> Value:
    """What ``enumerate`` gives."""
    value = given[0]
    if isinstance(value, Tensor):
        raise Missed("a loop over positions", node, Code.MIXES_POSITIONS)
    if isinstance(value, Items):
        numbers = [PLAIN if given[1:] else Plain(number) for number in range(len(value.values))]
        return Items(tuple(Items(pair) for pair in zip(numbers, value.values, strict=True)))
    if isinstance(value, Many):
        return Many(Items((PLAIN, value.value)))
    return Many(Items((PLAIN, value if isinstance(value, Whole) else PLAIN)))


def _zipped(given: list[Value], node: ast.AST) -> Value:
    """What ``zip`` gives."""
    if any(isinstance(value, Tensor) for value in given):
        raise Missed("a loop over positions", node, Code.MIXES_POSITIONS)
    if all(isinstance(value, Items) for value in given):
        rows = zip(*(value.values for value in given if isinstance(value, Items)), strict=False)
        return Items(tuple(Items(row) for row in rows))
    parts = [value.value if isinstance(value, Many) else value for value in given]
    if any(isinstance(part, Items) for part in parts):
        raise Missed("a loop that is not followed", node)
    return Many(Items(tuple(parts)))


_LISTS: dict[str, Callable[[list[Value], ast.AST], Value]] = {
    "enumerate": _numbered,
    "len": _length,
    "zip": _zipped,
}


def _torch(name: str, arguments: Arguments, node: ast.Call) -> Value:
    if name in RANDOM:
        raise Missed("it draws random numbers, which differ between ranks", node, Code.RANDOM)
    _check_known(arguments, node)
    if any(isinstance(value, Tensor) for value in arguments.every):
        return operation(name, arguments.given, arguments.named, node)
    if any(isinstance(value, Size) and is_positional(value.dim) for value in arguments.every):
        raise Missed(f"it calls {name} with the number of positions", node, Code.MIXES_POSITIONS)
    return PLAIN


def _check_known(arguments: Arguments, node: ast.Call) -> None:
    for value in arguments.every:
        if isinstance(value, Whole | Unknown):
            tensor_like(value, node)


def _operation(function: Operation, arguments: Arguments, node: ast.Call) -> Value:
    """A method of a value."""
    value, name = used(function.value, node), function.name
    if isinstance(value, Tensor):
        _check_known(arguments, node)
        return operation(name, [value, *arguments.given], arguments.named, node)
    if isinstance(value, Whole):
        if (result := of_cache(name, arguments)) is not None:
            return result
        if name in ("get", "pop", "items", "keys", "values", "copy"):
            return read_from(value, arguments.first if name in ("get", "pop") else PLAIN, node)
        raise Missed(f"it asks {value.name} for {name}", node)
    if value == STATE:
        return STATE
    if isinstance(value, Many) and name in ("values", "get"):
        return value if name == "values" else value.value
    if isinstance(value, Many | Items) and name in ("keys", "items", "index", "count"):
        return PLAIN
    raise Missed(f"it calls {ast.unparse(node.func)}, which is not followed", node)


def _module(
    name: str, made: ast.expr | None, arguments: Arguments, node: ast.Call, frame: Frame[Value], file: File
) -> Value:
    """A call of an instance of one class."""
    first, view = arguments.first, file.view
    if name == ":activation" or ".activations." in name:
        return operation("silu", [tensor_like(first, node)], {}, node)
    if name.startswith("torch.nn."):
        return _torch_module(name.removeprefix("torch.nn."), first, made, node, frame)
    if name.endswith("pytorch_utils.Conv1D"):
        return operation("linear", [tensor_like(first, node)], {}, node)
    if name not in view.scope.classes:
        raise Missed(f"{name.rpartition('.')[2]} is a class of another file", node, Code.OTHER_FILE)
    if name in file.experts:
        return _sent(name, arguments, node, file)
    if method_of(view, name, "__call__") is not None:
        raise Missed(f"{name} defines __call__", node, Code.REPLACED)
    forward = method_of(view, name, "forward")
    if forward is not None:
        return _followed(Method(forward[0], Own(name)), arguments, node, frame, file)
    if base := _torch_base(name, file):
        return _torch_module(base, first, made, node, frame)
    raise Missed(f"{name} has no forward in this file", node, Code.OTHER_FILE)


def _torch_base(name: str, file: File) -> str:
    """The class of torch, other than Module, that a class inherits from; empty if there is none."""
    bases = [file.view.scope.dotted(base) for owner in lineage(file.view, name) for base in owner.bases]
    known = [base for base in bases if base.startswith("torch.nn.") and base != "torch.nn.Module"]
    return known[0].removeprefix("torch.nn.") if known else ""


def _torch_module(
    name: str, first: Value, made: ast.expr | None, node: ast.Call, frame: Frame[Value]
) -> Value:
    value = tensor_like(first, node)
    if not isinstance(value, Tensor):
        return PLAIN
    if name in POINTWISE:
        return value
    if name == "Linear":
        return operation("linear", [value], {}, node)
    if name in NORMS:
        return operation("layer_norm", [value], {}, node)
    if name == "Embedding":
        return Tensor((*value.dims, fresh()))
    if name == "Softmax" and isinstance(made, ast.Call):
        spec = _arguments(made, Frame(frame.domain, {}))
        return operation("softmax", [value, *spec.given], spec.named, node)
    raise Missed(f"it calls torch's {name}, which may mix positions", node, Code.MIXES_POSITIONS)


def _sent(name: str, arguments: Arguments, node: ast.Call, file: File) -> Value:
    """Experts that their own idiom knows: each token goes through its experts alone."""
    if not file.experts[name]:
        raise Missed(f"experts that are not recognised: {name}", file.view.classes[name], Code.OTHER_FORM)
    passed = (*arguments.given, *arguments.named.values())
    tensors = [value for value in passed if isinstance(value, Tensor)]
    rows = tensors[0].dims[0] if tensors else ()
    if len(tensors) < len(passed) or len(tensors) < 2:
        raise Missed(f"what {name} gets is not followed", node)
    if not is_positional(rows) or any(tensor.dims[0] != rows for tensor in tensors):
        raise Missed(f"what {name} gets is not one row for each position", node)
    return Tensor((rows, *(fresh() for _ in tensors[0].dims[1:])))


def _above(node: ast.Call, frame: Frame[Value], file: File) -> Value:
    """A call of ``super().method``."""
    own, name = frame.values.get("self"), super_name(node.func)
    owners = list(lineage(file.view, own.owner)) if isinstance(own, Own) else []
    holding = [owner for owner in owners if name in file.view.methods(owner)]
    following = holding[holding.index(frame.home) + 1 :] if frame.home in holding else []
    arguments = _arguments(node, frame)
    if not following and name == "forward" and isinstance(own, Own):
        if base := _torch_base(own.owner, file):
            return _torch_module(base, arguments.first, None, node, frame)
    if not following or not isinstance(own, Own):
        raise Missed(f"super().{name} is in another file", node, Code.OTHER_FILE)
    method = Method(file.view.methods(following[0])[name], own)
    return _followed(method, arguments, node, frame, file, following[0])


def _followed(
    method: Method,
    arguments: Arguments,
    node: ast.AST,
    frame: Frame[Value],
    file: File,
    home: ast.ClassDef | None = None,
) -> Value:
    """The result of a function or method of the file, which the class ``home`` defines if it is given.

    Raises:
        Missed: it moves or mixes positions, or cannot be followed.
    """
    function, own = method.node, method.owner
    if file.tower:
        try:
            segments = read(function)
        except Missed as error:
            raise Missed(error.reason.after(function.name), node) from None
        file.segments += [segments] if segments is not None else []
    decorators = {decorator_name(decorator) for decorator in function.decorator_list}
    if other := sorted(name for name in decorators if name not in DECORATORS and "kernel" not in name):
        raise Missed(f"{function.name} is decorated with {other[0]}", function, Code.DECORATED)
    if frame.depth > _DEPTH:
        raise Missed(f"{function.name} calls itself", function)
    inner = Frame(frame.domain, {}, depth=frame.depth + 1)
    if own is not None:
        holder = method_of(file.view, own.owner, function.name)
        inner.home = home or (file.view.classes[holder[1]] if holder is not None else None)
        if "staticmethod" not in decorators:
            arguments = replace(arguments, given=(own, *arguments.given))
    frame.domain.followed[f"{inner.home.name}.{function.name}" if inner.home else function.name] = None
    try:
        inner.values = _parameters(function, arguments, frame)
        result = run(function.body, inner)
    except Missed as error:
        where = f"{own.owner}.{function.name}" if own is not None else function.name
        raise Missed(error.reason if ": " in error.reason else error.reason.after(where)) from None
    return NOTHING if result is None or result == EMPTY else result


def _parameters(
    function: ast.FunctionDef | ast.AsyncFunctionDef, arguments: Arguments, frame: Frame[Value]
) -> dict[str, Value]:
    """The values of a function's parameters; those that ``**`` may set are not known."""
    passed = bound(function, arguments.given, {**arguments.named})
    values = passed.values
    for name, default in passed.defaults.items():
        values[name] = Whole(name) if default is None else evaluate(default, Frame(frame.domain, {}))
        if arguments.bag is not None and default is not None:
            values[name] = Whole(name) if values[name] == NOTHING else PLAIN
    if function.args.vararg is not None:
        values[function.args.vararg.arg] = Items(tuple(passed.rest))
    elif passed.rest:
        raise Missed("it gets more arguments than it has parameters", function, Code.OTHER_ARGUMENTS)
    if (kwarg := function.args.kwarg) is not None:
        parts = tuple((name, value) for name, value in passed.others.items() if _holds_tensor(value))
        values[kwarg.arg] = Whole(f"**{kwarg.arg}", parts)
    return values


def _holds_tensor(value: Value) -> bool:
    return any(isinstance(part, Tensor) for part in of_all([value]))
