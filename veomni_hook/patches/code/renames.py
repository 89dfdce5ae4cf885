"""Parameters that upstream renamed and still takes by their old names, as its decorators say."""

from __future__ import annotations

import ast
from typing import NamedTuple

from veomni_hook.patches.code.document import Document, FunctionNode

__all__ = ["Rename", "renamed_parameters", "renames"]


class Rename(NamedTuple):
    """A parameter's new name, and the release in which the old one goes (empty: unknown)."""

    new: str
    until: str = ""


def renamed_parameters(document: Document) -> dict[str, Rename]:
    """Return the old names of parameters that functions of a module still take, each with its rename."""
    functions = (definition.node for definition in document.definitions())
    return {
        old: rename
        for function in functions
        if isinstance(function, FunctionNode)
        for old, rename in renames(function).items()
    }


def renames(function: FunctionNode) -> dict[str, Rename]:
    """Return the old names of a function's parameters, by the decorators that hand them on.

    Such a decorator is a call with two identifiers among its constants: one is a parameter of the function
    and one is none. transformers writes ``@deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")``.
    """
    arguments = function.args
    parameters = {a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    known: dict[str, Rename] = {}
    for decorator in function.decorator_list:
        if not isinstance(decorator, ast.Call):
            continue
        values = [*decorator.args, *(keyword.value for keyword in decorator.keywords)]
        texts = [v.value for v in values if isinstance(v, ast.Constant) and isinstance(v.value, str)]
        old = [text for text in texts if text.isidentifier() and text not in parameters]
        new = [text for text in texts if text in parameters]
        until = [text for text in texts if text[:1].isdigit()]
        if len(old) == len(new) == 1:
            known[old[0]] = Rename(new[0], *until[:1])
    return known
