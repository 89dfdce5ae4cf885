"""Signatures as text, and the difference between two of them in words."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.tree import FUNCTIONS, without_annotations

__all__ = ["difference", "own_functions", "signature"]


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
                {names.get(parameter, parameter): value for parameter, value in _parameters(arguments)},
                dict(_parameters(after[name])),
            )
        ):
            said.append(f"{name}: {change}" if name else change)
    return "; ".join(said)


def _functions(text: str) -> Iterator[tuple[str, ast.arguments]]:
    for line in text.splitlines():
        name = line.partition("(")[0]
        function = ast.parse(f"def f{line.removeprefix(name)}: ...").body[0]
        if isinstance(function, FUNCTIONS):
            yield name, function.args


def _parameters(arguments: ast.arguments) -> Iterator[tuple[str, tuple[str, str | None]]]:
    """Yield each parameter's name with its kind and default, in their order."""
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + [
        ast.unparse(d) for d in arguments.defaults
    ]
    for index, (argument, default) in enumerate(zip(positional, defaults, strict=True)):
        kind = "positional only" if index < len(arguments.posonlyargs) else "positional"
        yield argument.arg, (kind, default)
    if arguments.vararg is not None:
        yield f"*{arguments.vararg.arg}", ("rest", None)
    for argument, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield argument.arg, ("keyword only", ast.unparse(value) if value is not None else None)
    if arguments.kwarg is not None:
        yield f"**{arguments.kwarg.arg}", ("keywords", None)


_Parameter = tuple[str, str | None]


def _changed(before: dict[str, _Parameter], after: dict[str, _Parameter]) -> str:
    dropped = [name for name in before if name not in after]
    added = [_shown(name, after[name]) for name in after if name not in before]
    other = [
        f"{_shown(name, before[name])} is now {_shown(name, after[name])}"
        for name in before
        if name in after and before[name] != after[name]
    ]
    said = [f"no {', '.join(dropped)} any more"] if dropped else []
    said += [f"new: {', '.join(added)}"] if added else []
    said += other
    if not said and [*before] != [*after]:
        said = ["the parameters have another order"]
    return "; ".join(said)


def _shown(name: str, parameter: _Parameter) -> str:
    kind, default = parameter
    remark = f" ({kind})" if kind in ("positional only", "keyword only") else ""
    return (name if default is None else f"{name}={default}") + remark
