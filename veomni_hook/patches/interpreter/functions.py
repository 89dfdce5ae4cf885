"""Calls of functions of the same file: the arguments, and the parameters that they become."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.tree import last_name

__all__ = ["Bound", "bound", "receiver_name", "super_name"]

V = TypeVar("V")


@dataclass(slots=True)
class Bound(Generic[V]):
    """What a call gives to the parameters of a function.

    Attributes:
        values: by name.
        defaults: the parameters without a value, each with its default, or None.
        rest: positional arguments beyond the parameters.
        others: keyword arguments that are no parameters.
        repeated: whether a keyword names a parameter that has a value.
    """

    values: dict[str, V]
    defaults: dict[str, ast.expr | None] = field(default_factory=dict)
    rest: list[V] = field(default_factory=list)
    others: dict[str, V] = field(default_factory=dict)
    repeated: bool = False


def bound(function: FunctionNode, positional: Sequence[V], keywords: dict[str, V]) -> Bound[V]:
    """Bind the arguments of a call."""
    spec = function.args
    names = [parameter.arg for parameter in (*spec.posonlyargs, *spec.args)]
    only = [parameter.arg for parameter in spec.kwonlyargs]
    result = Bound(dict(zip(names, positional, strict=False)), rest=list(positional[len(names) :]))
    for name, value in keywords.items():
        result.repeated |= name in result.values
        (result.values if name in (*names, *only) else result.others)[name] = value
    defaults: dict[str, ast.expr | None] = dict.fromkeys((*names, *only))
    defaults.update(zip(names[len(names) - len(spec.defaults) :], spec.defaults, strict=True))
    defaults.update(zip(only, spec.kw_defaults, strict=True))
    result.defaults = {name: default for name, default in defaults.items() if name not in result.values}
    return result


def super_name(function: ast.expr) -> str:
    """The name of the method that ``super().name`` refers to; empty for other code."""
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Call):
        if not function.value.args and last_name(function.value.func) == "super":
            return function.attr
    return ""


def receiver_name(function: FunctionNode) -> str:
    """The method's name for its instance."""
    parameters = [*function.args.posonlyargs, *function.args.args]
    return parameters[0].arg if parameters else ""
