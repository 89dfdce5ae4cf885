"""Parameters that upstream renamed and still takes by their old names, as its decorators say.

@deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
def forward(self, hidden_states, cache=None): ...
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection
from typing import NamedTuple

from veomni_hook.patches.code.document import Document, FunctionNode
from veomni_hook.patches.code.expressions import decorator_name
from veomni_hook.patches.code.scope import parameter_names
from veomni_hook.patches.code.walk import walk_ast

__all__ = ["Rename", "renamed_parameters", "renames", "renaming_decorators"]

#: The module of transformers whose decorators say that a keyword is deprecated.
_HOME = "utils.deprecation"
_RELEASE = re.compile(r"v?(?P<release>\d+(?:\.\d+)+)")


class Rename(NamedTuple):
    """A parameter's new name, and the release in which the old one goes (empty: unknown)."""

    new: str
    until: str = ""


def renaming_decorators(tree: ast.Module) -> frozenset[str]:
    """Return what a module calls the decorators of transformers that hand on old keywords."""
    return frozenset(
        each.asname or each.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and f".{node.module or ''}".endswith(f".{_HOME}")
        for each in node.names
    )


def renamed_parameters(document: Document) -> dict[str, Rename]:
    """Return the old names of parameters that functions of a module still take, each with its rename."""
    decorators = renaming_decorators(document.tree)
    functions = (definition.node for definition in document.definitions() if decorators)
    return {
        old: rename
        for function in functions
        if isinstance(function, FunctionNode)
        for old, rename in renames(function, decorators).items()
    }


def renames(function: FunctionNode, decorators: Collection[str]) -> dict[str, Rename]:
    """Return the old names of a function's parameters.

    The constants of such a decorator are two names and a release, in whatever order they are passed: the
    function has the new one. If it has both, or gets the new one in ``**kwargs``, the old one comes first.

    Args:
        function: upstream's function.
        decorators: the names of the decorators, from `renaming_decorators`.
    """
    taken = parameter_names(function)
    known: dict[str, Rename] = {}
    for decorator in function.decorator_list:
        if not isinstance(decorator, ast.Call) or decorator_name(decorator) not in decorators:
            continue
        values = [node.value for node in walk_ast(decorator) if isinstance(node, ast.Constant)]
        texts = [value for value in values if isinstance(value, str)]
        until = [match["release"] for text in texts if (match := _RELEASE.fullmatch(text))]
        names = [text for text in texts if text.isidentifier()]
        if len(names) == 2:  # with one name, a parameter is to go and has no other
            old, new = reversed(names) if {*names} & taken == {names[0]} else names
            known[old] = Rename(new, *until[:1])
    return known
