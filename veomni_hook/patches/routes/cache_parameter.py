"""Which parameter of a forward is its cache: read from the code, because releases rename it."""

from __future__ import annotations

import ast
import re

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.expressions import last_name
from veomni_hook.patches.code.scope import parameters
from veomni_hook.patches.code.walk import walk_ast
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.upstream_names import names

__all__ = ["cache_parameters"]

#: The module of transformers that defines caches, and the method of all of them since 4.36.
_HOME, _LENGTH = "cache_utils", "get_seq_length"
#: Its names, for a forward that only hands it on.
_NAMES = names("the cache")


def cache_parameters(view: ModuleView, forward: FunctionNode) -> list[str]:
    """Return the parameters of ``forward`` that are caches; upstream's have one at most.

    These are parameters that the signature says to be of a cache's class, that the body makes one, or whose
    length it asks for; or else one with a cache's name.
    """
    kinds = _classes(view)
    caches = {
        each.arg
        for each in parameters(forward)
        if each.annotation is not None and kinds & set(re.findall(r"\w+", view.text(each.annotation)))
    }
    for node in walk_ast(forward):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            if last_name(node.value.func) in kinds:
                caches |= {each.id for each in node.targets if isinstance(each, ast.Name)}
        elif isinstance(node, ast.Attribute) and node.attr == _LENGTH and isinstance(node.value, ast.Name):
            caches.add(node.value.id)
    taken = [each.arg for each in parameters(forward)]
    return [name for name in taken if name in caches] or [name for name in taken if name in _NAMES]


def _classes(view: ModuleView) -> set[str]:
    """The names of caches' classes: imported ones, those that inherit from them, plain ones of the file."""
    kinds = {
        each.asname or each.name
        for node in view.document.tree.body
        if isinstance(node, ast.ImportFrom) and (node.module or "").rpartition(".")[2] == _HOME
        for each in node.names
    }
    for name, kind in view.classes.items():
        bases = {last_name(each) for each in kind.bases}
        if bases & kinds or (not bases and not kind.decorator_list):
            kinds.add(name)
    return kinds
