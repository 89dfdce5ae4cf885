"""Follow calls into functions and methods of the same file."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import TypeAlias

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.scope import local_names
from veomni_hook.patches.code.tree import decorator_name, last_name
from veomni_hook.patches.graph.interpreter.memory import roots
from veomni_hook.patches.graph.interpreter.state import Frame, UnclearError
from veomni_hook.patches.graph.nodes import Node

__all__ = [
    "HARMLESS_DECORATORS",
    "Arguments",
    "Callee",
    "followed",
    "own_method",
    "receiver_name",
    "super_method",
]

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


@dataclass(slots=True)
class Arguments:
    """The evaluated arguments of a call."""

    positional: list[Node]
    keywords: dict[str, Node]

    @property
    def plain(self) -> bool:
        """Whether there are no ``*`` and ``**`` arguments."""
        return "**" not in self.keywords and all(node.op != "star" for node in self.positional)


def followed(callee: Callee, arguments: Arguments, frame: Frame) -> Node | None:
    """The result of a call of a function of this file; None if the call is not followed.

    Raises:
        UnclearError: the function changes an argument in place.
    """
    function, home, on_self = callee
    trace = frame.trace
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
    inner = Frame(trace, values, local_names(function), frame.depth + 1)
    inner.borrowed = frozenset(root for value in values.values() for root in roots(value))
    if on_self:
        inner.owner, inner.home = frame.owner, home
        inner.values.update(_attributes(frame))
    calls, effects = len(trace.calls), len(trace.effects)
    try:
        result = trace.run(function.body, inner)
    except UnclearError as error:
        # A call that is not followed becomes an unknown call, unless it may have changed known values.
        if error.writes:
            raise
        del trace.calls[calls:], trace.effects[effects:]
        return None
    if on_self:
        frame.values.update(_attributes(inner))
    if result is not None and result.op == "raise":
        return None
    trace.inlined[f"{home.name}.{function.name}" if home is not None else function.name] = None
    value = Node("constant") if result is None else Node(result.op, result.args, result.value)
    value.facts["followed"] = None
    return value


def own_method(name: str, frame: Frame) -> Callee | None:
    """The method that ``self.name`` refers to."""
    method = frame.trace.scope.method(frame.owner, name) if frame.owner is not None else None
    return (*method, True) if method is not None else None


def super_method(function: ast.expr, frame: Frame) -> Callee | None:
    """The method that ``super().name`` refers to in the current method."""
    if not isinstance(function, ast.Attribute) or frame.home is None:
        return None
    value = function.value
    if not isinstance(value, ast.Call) or value.args or last_name(value.func) != "super":
        return None
    method = frame.trace.scope.method(frame.home, function.attr, above=True)
    return (*method, True) if method is not None else None


def receiver_name(function: FunctionNode) -> str:
    """The method's name for its instance."""
    parameters = [*function.args.posonlyargs, *function.args.args]
    return parameters[0].arg if parameters else ""


def _attributes(frame: Frame) -> dict[str, Node]:
    """The attributes of ``self`` that were set, as ``self.<name>``."""
    return {name: value for name, value in frame.values.items() if name.startswith("self.")}


def _parameter_values(
    function: FunctionNode, positional: list[Node], keywords: dict[str, Node]
) -> dict[str, Node] | None:
    """The value of each parameter; None if the call does not fit, or passes anything to ``*`` or ``**``."""
    spec = function.args
    names = [parameter.arg for parameter in (*spec.posonlyargs, *spec.args)]
    if len(positional) > len(names):
        return None
    values = dict(zip(names, positional, strict=False))
    keyword_only = [parameter.arg for parameter in spec.kwonlyargs]
    for name, value in keywords.items():
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
