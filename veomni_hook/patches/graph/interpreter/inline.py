"""Follow calls into functions and methods of the same file."""

from __future__ import annotations

import ast

from veomni_hook.patches.graph.interpreter.calls import Arguments, Callee
from veomni_hook.patches.graph.nodes import Node
from veomni_hook.patches.graph.interpreter.state import Frame, Trace, UnclearError, roots
from veomni_hook.patches.structure.scope import local_names
from veomni_hook.patches.text.document import FunctionNode

__all__ = [
    "HARMLESS",
    "bound_arguments",
    "decorator_name",
    "entered",
    "followed",
    "receiver_name",
    "super_method",
]

_DEPTH = 6
#: Decorators that do not change what a function computes.
HARMLESS = (
    "staticmethod",
    "script",
    "use_kernel_func_from_hub",
    "use_kernel_forward_from_hub",
    "compile_friendly",
)


def followed(callee: Callee, arguments: Arguments, frame: Frame, trace: Trace) -> Node | None:
    """The result of a call of a function of this file; None if the call is not followed.

    Raises:
        UnclearError: the function changes an argument in place.
    """
    from veomni_hook.patches.graph.interpreter.statements import run

    function, home, on_self = callee
    static = any(decorator_name(decorator) == "staticmethod" for decorator in function.decorator_list)
    if (
        isinstance(function, ast.AsyncFunctionDef)
        or not arguments.plain
        or frame.depth >= _DEPTH
        or any(decorator_name(decorator) not in HARMLESS for decorator in function.decorator_list)
    ):
        return None
    receiver = receiver_name(function) if on_self and not static else ""
    values = bound_arguments(function, arguments, receiver, trace)
    if values is None:
        return None
    inner = entered(function, values, frame.depth + 1)
    inner.borrowed = frozenset(root for value in values.values() for root in roots(value))
    if on_self:
        inner.owner, inner.home = frame.owner, home
        inner.receiver = receiver
        for name, value in frame.values.items():
            if name.startswith("self."):
                inner.values[name] = value
    held = (len(trace.calls), len(trace.effects))
    try:
        result = run(function.body, inner, trace)
    except UnclearError as error:
        # A call that is not followed becomes an unknown call, unless it may have changed known values.
        if error.writes:
            raise
        del trace.calls[held[0] :], trace.effects[held[1] :]
        return None
    if on_self:
        frame.values.update({n: v for n, v in inner.values.items() if n.startswith("self.")})
    if result is not None and result.op == "raise":
        return None
    trace.inlined[f"{home.name}.{function.name}" if home is not None else function.name] = None
    made = Node("constant") if result is None else Node(result.op, result.args, result.value)
    made.facts["followed"] = None
    return made


def super_method(function: ast.expr, frame: Frame, trace: Trace) -> Callee | None:
    """The method that ``super().name`` refers to in the current method."""
    if not isinstance(function, ast.Attribute) or frame.home is None:
        return None
    value = function.value
    if not isinstance(value, ast.Call) or value.args or ast.unparse(value.func) != "super":
        return None
    found = trace.scope.method(frame.home, function.attr, above=True)
    return (*found, True) if found is not None else None


def entered(function: FunctionNode, values: dict[str, Node], depth: int) -> Frame:
    """The frame of a function whose parameters have these values."""
    return Frame(values, local_names(function), depth)


def receiver_name(function: FunctionNode) -> str:
    """The method's name for its instance."""
    parameters = [*function.args.posonlyargs, *function.args.args]
    return parameters[0].arg if parameters else ""


def bound_arguments(
    function: FunctionNode, arguments: Arguments, receiver: str, trace: Trace
) -> dict[str, Node] | None:
    """The value of each parameter; None if the call does not fit, or passes anything to ``*`` or ``**``."""
    spec = function.args
    names = [parameter.arg for parameter in (*spec.posonlyargs, *spec.args)]
    given = [Node("self"), *arguments.positional] if receiver else list(arguments.positional)
    if len(given) > len(names):
        return None
    values = dict(zip(names, given, strict=False))
    keyword_only = [parameter.arg for parameter in spec.kwonlyargs]
    for name, value in arguments.keywords.items():
        if name not in (*names, *keyword_only) or name in values:
            return None
        values[name] = value
    defaults = dict(zip(names[len(names) - len(spec.defaults) :], spec.defaults, strict=True))
    defaults.update((n, d) for n, d in zip(keyword_only, spec.kw_defaults, strict=True) if d is not None)
    for name in (*names, *keyword_only):
        if name not in values:
            default = defaults.get(name)
            if not isinstance(default, ast.Constant):
                return None
            values[name] = Node("constant", (), default.value)
    if spec.vararg is not None:
        values[spec.vararg.arg] = Node("tuple")
    if spec.kwarg is not None:
        values[spec.kwarg.arg] = Node("dict")
    return values


def decorator_name(node: ast.expr) -> str:
    """The last name of a decorator, whether it is called or not."""
    while isinstance(node, ast.Call):
        node = node.func
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
