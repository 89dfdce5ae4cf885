"""Signatures as text, and the difference between two of them in words."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Mapping
from itertools import repeat

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.tree import FUNCTIONS, without_annotations

__all__ = ["difference", "own_functions", "parameters_of", "signature"]

_STARS: Mapping[inspect._ParameterKind, str] = {
    inspect.Parameter.VAR_POSITIONAL: "*",
    inspect.Parameter.VAR_KEYWORD: "**",
}
_ONLY = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.KEYWORD_ONLY)


def signature(node: ast.AST) -> str:
    """Return a function's parameters without annotations; for a class those of every method, one per line."""
    return "\n".join(
        f"{name}({ast.unparse(without_annotations(function.args))})" for name, function in own_functions(node)
    )


def own_functions(node: ast.AST | None) -> Iterator[tuple[str, FunctionNode]]:
    """Yield a function under an empty name, or the methods of a class."""
    if isinstance(node, FUNCTIONS):
        yield "", node
    for item in node.body if isinstance(node, ast.ClassDef) else ():
        if isinstance(item, FUNCTIONS):
            yield item.name, item


def parameters_of(arguments: ast.arguments) -> list[inspect.Parameter]:
    """Return parameters as `inspect` has them, with expressions as defaults and annotations."""
    kinds, first = inspect.Parameter, len(arguments.posonlyargs)
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + arguments.defaults
    every = [
        *zip(repeat(kinds.POSITIONAL_ONLY), positional[:first], defaults[:first], strict=False),
        *zip(repeat(kinds.POSITIONAL_OR_KEYWORD), positional[first:], defaults[first:], strict=False),
        (kinds.VAR_POSITIONAL, arguments.vararg, None),
        *zip(repeat(kinds.KEYWORD_ONLY), arguments.kwonlyargs, arguments.kw_defaults, strict=False),
        (kinds.VAR_KEYWORD, arguments.kwarg, None),
    ]
    return [
        kinds(one.arg, kind, default=default or kinds.empty, annotation=one.annotation)
        for kind, one, default in every
        if one is not None
    ]


def difference(old: str, new: str, renamed: Mapping[str, Mapping[str, str]] | None = None) -> str:
    """Return what differs between two signatures, or an empty text.

    Args:
        old, new: the signatures.
        renamed: the new names of renamed parameters, which are no difference, by function.

    Raises:
        SyntaxError: one of them does not come from `signature`.
    """
    before, after = dict(_functions(old)), dict(_functions(new))
    said = [f"no method {name} any more" for name in before if name not in after]
    said += [f"new method {name}" for name in after if name not in before]
    for name, arguments in before.items():
        names = (renamed or {}).get(name, {})
        if name in after and (
            change := _changed(
                {names.get(parameter, parameter): value for parameter, value in arguments.items()},
                after[name],
            )
        ):
            said.append(f"{name}: {change}" if name else change)
    return "; ".join(said)


_Parameters = dict[str, tuple[inspect._ParameterKind, str]]


def _functions(text: str) -> Iterator[tuple[str, _Parameters]]:
    """The functions of a signature, with the kind and the default of each parameter."""
    for line in text.splitlines():
        name = line.partition("(")[0]
        function = ast.parse(f"def f{line.removeprefix(name)}: ...").body[0]
        parameters: _Parameters = {}
        for one in parameters_of(function.args) if isinstance(function, FUNCTIONS) else ():
            default = "" if one.default is one.empty else ast.unparse(one.default)
            parameters[f"{_STARS.get(one.kind, '')}{one.name}"] = one.kind, default
        yield name, parameters


def _changed(before: _Parameters, after: _Parameters) -> str:
    dropped = [name for name in before if name not in after]
    added = [_shown(name, after) for name in after if name not in before]
    other = [
        f"{_shown(name, before)} is now {_shown(name, after)}"
        for name in before
        if name in after and before[name] != after[name]
    ]
    said = [f"no {', '.join(dropped)} any more"] if dropped else []
    said += [f"new: {', '.join(added)}"] if added else []
    said += other
    if not said and [*before] != [*after]:
        said = ["the parameters have another order"]
    return "; ".join(said)


def _shown(name: str, parameters: _Parameters) -> str:
    kind, default = parameters[name]
    remark = f" ({kind.description.replace('-', ' ')})" if kind in _ONLY else ""
    return (f"{name}={default}" if default else name) + remark
