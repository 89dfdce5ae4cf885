"""Which parameter of a forward is its cache: read from the code, because releases rename it."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.scope import parameters
from veomni_hook.patches.code.template import Template
from veomni_hook.patches.code.tree import last_name, walk_ast
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.upstream_names import names

__all__ = ["cache_parameters", "hands_on_cache", "made_unasked"]

#: The module of transformers that defines caches, and the method of all of them since 4.36.
_HOME, _LENGTH = "cache_utils", "get_seq_length"
#: What layers call of caches alone; and `update`, as dictionaries have it, with keys and values.
_METHODS = frozenset(
    (_LENGTH, "get_mask_sizes", "has_previous_state", "update_conv_state", "update_recurrent_state")
)
_UPDATE, _STATES = "update", 2
#: Its names, for a forward that only hands it on.
_NAMES = names("the cache")
_MADE = Template("if CACHE is None:\n    CACHE = MAKER")


def cache_parameters(view: ModuleView, forward: FunctionNode) -> list[str]:
    """Return the parameters of ``forward`` that are caches; upstream's have one at most.

    These are parameters that the signature says to be of a cache's class, that the body makes one, or whose
    length it asks for; or else those that it hands on to a function that uses them so; or else one with a
    cache's name.
    """
    kinds = _classes(view)
    caches = {
        parameter.arg
        for parameter in parameters(forward)
        if parameter.annotation is not None
        and kinds & set(re.findall(r"\w+", view.text(parameter.annotation)))
    }
    for node in walk_ast(forward):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            if last_name(node.value.func) in kinds:
                caches |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.Attribute) and node.attr == _LENGTH and isinstance(node.value, ast.Name):
            caches.add(node.value.id)
    taken = [parameter.arg for parameter in parameters(forward)]

    def among(known: Collection[str]) -> list[str]:
        return [name for name in taken if name in known]

    return among(caches) or among(_asked(view)) or among(_NAMES)


def hands_on_cache(view: ModuleView, code: ast.AST) -> bool:
    """Whether ``code`` hands something to a parameter that functions of the module use as a cache."""
    asked = _asked(view)
    keywords = [keyword for node in walk_ast(code) if isinstance(node, ast.Call) for keyword in node.keywords]
    return any(keyword.arg in asked and not isinstance(keyword.value, ast.Constant) for keyword in keywords)


def made_unasked(forward: FunctionNode, cache: str) -> ast.expr | None:
    """The condition of a statement that makes a cache wherever there is none, also if none is asked for."""
    for statement in forward.body:
        if isinstance(statement, ast.If) and _MADE.match(statement, CACHE=cache) is not None:
            return statement.test
    return None


def _asked(view: ModuleView) -> set[str]:
    """The parameters that functions of a module use as a cache, and the names that are handed on to those."""
    asked = set[str]()
    handed: list[tuple[str, str]] = []
    for _, owner, function in view.every_function():
        # Not the object whose method it is: a module may define a class of caches.
        own = {parameter.arg for parameter in parameters(function)[owner is not None :]}
        for node in walk_ast(function):
            if not isinstance(node, ast.Call):
                continue
            handed += [
                (keyword.value.id, keyword.arg)
                for keyword in node.keywords
                if keyword.arg is not None and isinstance(keyword.value, ast.Name)
            ]
            match node.func:
                case ast.Attribute(value=ast.Name(name), attr=method) if name in own:
                    if method in _METHODS or (method == _UPDATE and len(node.args) >= _STATES):
                        asked.add(name)
    while more := {name for name, taken in handed if taken in asked} - asked:
        asked |= more
    return asked


def _classes(view: ModuleView) -> set[str]:
    """The names of caches' classes: imported ones, those that inherit from them, plain ones of the file."""
    kinds = {
        name.asname or name.name
        for node in view.document.tree.body
        if isinstance(node, ast.ImportFrom) and (node.module or "").rpartition(".")[2] == _HOME
        for name in node.names
    }
    for name, kind in view.classes.items():
        bases = {last_name(base) for base in kind.bases}
        if bases & kinds or (not bases and not kind.decorator_list):
            kinds.add(name)
    return kinds
