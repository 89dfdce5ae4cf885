"""Parameters that upstream renamed and still takes by their old names, as its decorators say."""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from veomni_hook.patches.code.comparison import fingerprint
from veomni_hook.patches.code.document import DefinitionNode, Document, FunctionNode
from veomni_hook.patches.code.scope import parameter_names
from veomni_hook.patches.code.tree import walk_ast

__all__ = ["Rename", "earlier_digests", "renamed_parameters", "renames"]

_RELEASE = re.compile(r"v?(?P<number>\d+(?:\.\d+)+)")


class Rename(NamedTuple):
    """A parameter's new name, and the release in which the old one goes."""

    new: str
    until: str


def renamed_parameters(document: Document) -> dict[str, Rename]:
    """Return the old names of parameters that functions of a module still take, each with its rename."""
    functions = (definition.node for definition in document.definitions())
    return {
        old: rename
        for function in functions
        if isinstance(function, FunctionNode)
        for old, rename in renames(function).items()
    }


def earlier_digests(document: Document, node: DefinitionNode) -> Iterator[str]:
    """The digests of a definition's code with the names that parameters had before upstream renamed them."""
    earlier: dict[str, list[str]] = {}
    for old, rename in renamed_parameters(document).items():
        earlier.setdefault(rename.new, []).append(old)
    for olds in product(*earlier.values()) if earlier else ():
        code, names = copy.deepcopy(node), dict(zip(earlier, olds, strict=True))
        for inner in walk_ast(code):
            match inner:
                case ast.Name(id=new) if new in names:
                    inner.id = names[new]
                case ast.arg(arg=new) | ast.keyword(arg=new) if new in names:
                    inner.arg = names[new]
        yield fingerprint(code)


def renames(function: FunctionNode) -> dict[str, Rename]:
    """Return the old names of a function's parameters, by the decorators that hand them on.

    Such a decorator is a call whose texts are two identifiers and a release, in whatever order: transformers
    writes ``@deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")``. The new name is a parameter of
    the function. If it has both, or gets the new one in ``**kwargs``, the decorator has the old one first.
    """
    taken = parameter_names(function)
    known: dict[str, Rename] = {}
    for decorator in function.decorator_list:
        if not isinstance(decorator, ast.Call):
            continue
        values = [node.value for node in walk_ast(decorator) if isinstance(node, ast.Constant)]
        texts = [value for value in values if isinstance(value, str)]
        until = [match["number"] for text in texts if (match := _RELEASE.fullmatch(text))]
        names = [text for text in texts if text.isidentifier()]
        if len(names) == 2 and len(until) == 1:  # with one name, a parameter is to go and has no other
            old, new = reversed(names) if {*names} & taken == {names[0]} else names
            known[old] = Rename(new, until[0])
    return known
