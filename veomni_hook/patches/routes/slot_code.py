"""The code with which a patched module asks a slot: guards, and the parameters that a slot takes."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterable, Mapping, Sequence

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.routes.insertion import free_name

__all__ = ["as_lambda", "ask", "parameters_as", "tuple_of"]

_LINE = 80


def ask(
    function: FunctionNode, slot: str, receiver: str, operands: Sequence[str], tests: Sequence[str] = ()
) -> str:
    """Statements that return a kernel's result, if the slot has a kernel; without indentation.

    Args:
        function: the function that gets the statements.
        slot: the slot's name.
        receiver: the function's name for its module.
        operands: the arguments for the slot and the kernel, as source text.
        tests: preconditions; operands are evaluated only if all of them hold.
    """
    kernel, given = free_name(function, "kernel"), free_name(function, "operands")
    lines = [
        f"{given} = {tuple_of(operands)}",
        f"if ({kernel} := {slot}.kernel({receiver}, *{given})) is not None:",
        f"    return {kernel}(*{given})",
    ]
    code = "\n".join(lines)
    if not tests:
        return code
    said = [f"({test})" if len(tests) > 1 and " or " in test else test for test in tests]
    indented = "\n".join(f"    {line}" for line in code.splitlines())
    return f"if {' and '.join(said)}:\n{indented}"


def tuple_of(values: Sequence[str]) -> str:
    """A tuple, on one line if it is short."""
    text = f"({', '.join(values)}{',' if len(values) == 1 else ''})"
    return text if len(text) <= _LINE else "(\n" + "".join(f"    {value},\n" for value in values) + ")"


def as_lambda(function: FunctionNode, values: Sequence[str]) -> str:
    """A lambda with the parameters of a function and a tuple of ``values``, which are code, as its result."""
    arguments = copy.deepcopy(function.args)
    for each in ast.walk(arguments):
        if isinstance(each, ast.arg):
            each.annotation = None
    body = ast.Tuple([ast.parse(value, mode="eval").body for value in values], ast.Load())
    return ast.unparse(ast.fix_missing_locations(ast.Lambda(arguments, body)))


def parameters_as(
    function: FunctionNode, operands: Mapping[str, str], fixed: Mapping[str, object] | None = None
) -> str | None:
    """A function's parameters as a slot takes them, with the kernel's names: ``query->q, cos, dim=1``.

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
