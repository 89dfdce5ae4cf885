"""Mapping the arguments of an upstream function to an op's operands.

A slot at a call site gets upstream's parameter list in source form: ``name`` or ``name=default``, separated
by commas; ``name->operand`` if the op uses another name; ``*`` and ``/`` as in Python. Other parameters (an
unused ``position_ids``) are bound and dropped.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from veomni_hook.errors import KernelError
from veomni_hook.kernels.selection.registry import load_attribute, registry

__all__ = ["binder", "operand_names"]

_RENAMED = re.compile(r"(\w+)\s*->\s*(\w+)")


def operand_names(op: str, variant: str) -> dict[str, Any]:
    """Return the operands of ``op``/``variant`` in order, each with its default (`inspect.Parameter.empty`).

    The names are those that the variant declares, else the positional parameters of its reference. Defaults
    come from the reference. Imports the reference.
    """
    declared = registry.op(op).variants[variant]
    parameters = inspect.signature(load_attribute(declared.reference)).parameters
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    found = {
        name: parameter.default for name, parameter in parameters.items() if parameter.kind in positional
    }
    names = declared.operands or found
    return {name: found.get(name, inspect.Parameter.empty) for name in names}


def binder(parameters: str, operands: Mapping[str, object]) -> Callable[..., tuple[Any, ...]]:
    """Return a function that maps upstream's arguments to the operands, as a tuple.

    Args:
        parameters: upstream's parameters in source form; empty: they are the operands.
        operands: the op's operands in order, with their defaults.

    Raises:
        KernelError: ``parameters`` does not have this form, or an operand has no parameter and no default.
    """
    aliases = {name: operand for name, operand in _RENAMED.findall(parameters)}
    text = _RENAMED.sub(r"\1", parameters) if parameters.strip() else ", ".join(operands)
    signature = _signature(text, parameters)
    named = [*signature.posonlyargs, *signature.args, *signature.kwonlyargs]
    by_operand = {aliases.get(argument.arg, argument.arg): argument.arg for argument in named}
    if unknown := [operand for operand in aliases.values() if operand not in operands]:
        raise _malformed(parameters, f"there is no operand {unknown[0]!r}, only {', '.join(operands)}")
    constants: dict[str, Any] = {}
    values: list[ast.expr] = []
    for number, (operand, default) in enumerate(operands.items()):
        if operand in by_operand:
            values.append(ast.Name(by_operand[operand], ast.Load()))
        elif default is inspect.Parameter.empty:
            raise _malformed(
                parameters, f"no parameter maps to the operand {operand!r}, which has no default"
            )
        else:
            constants[f"_default_{number}"] = default
            values.append(ast.Name(f"_default_{number}", ast.Load()))
    if not parameters.strip():
        _fill_defaults(signature, operands, constants)
    body = ast.Lambda(signature, ast.Tuple(values, ast.Load()))
    code = compile(ast.fix_missing_locations(ast.Expression(body)), f"<operands: {text}>", "eval")
    # The expression is a lambda that contains only names and literals, checked above.
    return eval(code, constants)  # type: ignore[no-any-return]


def _signature(text: str, parameters: str) -> ast.arguments:
    try:
        tree = ast.parse(f"lambda {text}: 0", mode="eval").body
    except SyntaxError as error:
        raise _malformed(parameters, f"it is not a parameter list: {error.msg}") from None
    if not isinstance(tree, ast.Lambda) or not isinstance(tree.body, ast.Constant):
        raise _malformed(parameters, "it is not a parameter list")
    for default in [*tree.args.defaults, *filter(None, tree.args.kw_defaults)]:
        try:
            ast.literal_eval(default)
        except ValueError:
            raise _malformed(parameters, f"the default {ast.unparse(default)} is not a literal") from None
    return tree.args


def _fill_defaults(
    signature: ast.arguments, operands: Mapping[str, object], constants: dict[str, object]
) -> None:
    for number, (name, default) in enumerate(operands.items()):
        if default is not inspect.Parameter.empty:
            constants[f"_default_{number}"] = default
            signature.defaults.append(ast.Name(f"_default_{number}", ast.Load()))
        elif signature.defaults:
            raise _malformed("", f"the operand {name!r} has no default and follows one that has")


def _malformed(parameters: str, why: str) -> KernelError:
    return KernelError(
        f"the parameters {parameters!r} bind no operands: {why}",
        where="kernel slot",
        fix="write upstream's parameters: name, name=literal or name->operand, with commas",
    )
