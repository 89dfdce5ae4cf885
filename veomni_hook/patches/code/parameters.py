"""A function's parameters under the kernel's names: the ``parameters`` of a slot."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping

from veomni_hook.patches.code.document import FunctionNode

__all__ = ["parameters_as"]


def parameters_as(
    function: FunctionNode, operands: Mapping[str, str], fixed: Mapping[str, object] | None = None
) -> str | None:
    """The parameter list with the kernel's names: ``query->q, cos, unsqueeze_dim=1``.

    Args:
        function: upstream's function.
        operands: names of its parameters to names of the kernel's operands.
        fixed: operands without a parameter, with their values.

    Returns:
        None if it does not define every operand: a default is not a literal, an operand has no parameter, or
        another parameter has the name of an operand.
    """
    fixed = fixed or {}
    spec = function.args
    positional = [*spec.posonlyargs, *spec.args]
    defaults = [None] * (len(positional) - len(spec.defaults)) + spec.defaults
    given = [(parameter.arg, default) for parameter, default in zip(positional, defaults, strict=True)]
    keywords = [(p.arg, default) for p, default in zip(spec.kwonlyargs, spec.kw_defaults, strict=True)]
    names = {name for name, _ in (*given, *keywords)}
    literal = all(default is None or _is_literal(default) for _, default in (*given, *keywords))
    taken = {*operands.values(), *fixed}
    if not literal or not operands.keys() <= names or (names - operands.keys()) & taken:
        return None
    parts = [_said(*parameter, operands) for parameter in given]
    if spec.posonlyargs:
        parts.insert(len(spec.posonlyargs), "/")
    named = [_said(*parameter, operands) for parameter in keywords] + list(_fixed(fixed.items()))
    if spec.vararg is not None or named:
        parts.append(f"*{spec.vararg.arg if spec.vararg is not None else ''}")
    parts += named
    if spec.kwarg is not None:
        parts.append(f"**{spec.kwarg.arg}")
    return ", ".join(parts)


def _fixed(values: Iterable[tuple[str, object]]) -> Iterable[str]:
    return (f"{operand}={value!r}" for operand, value in values)


def _said(name: str, default: ast.expr | None, operands: Mapping[str, str]) -> str:
    text = name if operands.get(name, name) == name else f"{name}->{operands[name]}"
    return text if default is None else f"{text}={ast.unparse(default)}"


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except ValueError:
        return False
    return True
