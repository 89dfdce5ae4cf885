"""LayerNorm: a class whose ``forward`` is one of the formulas of `veomni_hook.kernels.layer_norm.reference`.

`veomni_hook.patches.idioms.norms` routes it. An inherited ``forward`` counts for the class that defines it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.tree import called_attributes, walk_ast
from veomni_hook.patches.graph import ARGUMENT, ATTRIBUTE, NUMBER
from veomni_hook.patches.idioms.norms import PARAMETER, forward_site, is_centred
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Site

__all__ = ["CANDIDATES", "OP", "WORDS", "find"]

OP = "layer_norm"
WORDS = "LayerNorm"
CANDIDATES = (
    "every class whose name contains LayerNorm, and whose forward (with the methods that it calls on itself)"
    " subtracts a mean or calls torch's layer_norm; a class that inherits its forward counts with the class"
    " that defines it"
)

_RULES = {
    "hidden_states": ARGUMENT,
    "normalized_shape": ATTRIBUTE,
    "weight": PARAMETER,
    "bias": PARAMETER,
    "eps": NUMBER,
}


def find(view: ModuleView) -> Iterator[Site]:
    """Every candidate of a module."""
    for owner, forward in view.forwards():
        if "LayerNorm" in owner.name and _looks_like_it(view, owner, forward):
            yield forward_site(OP, view, owner, forward, _RULES)


def _looks_like_it(view: ModuleView, owner: ast.ClassDef, forward: FunctionNode) -> bool:
    """Whether ``forward``, or a method of the class that it calls, makes a class a candidate."""
    methods = view.methods(owner)
    functions = [forward, *(methods[name] for name in {*called_attributes(forward)} & methods.keys())]
    return any(is_centred(function) or _calls_operator(function) for function in functions)


def _calls_operator(function: FunctionNode) -> bool:
    return any(
        isinstance(node, ast.Call) and _is_operator(node.func, function) for node in walk_ast(function)
    )


def _is_operator(callee: ast.expr, function: FunctionNode) -> bool:
    """Whether ``callee`` is named layer_norm and is not an attribute of self, which may be any module."""
    if isinstance(callee, ast.Name):
        return callee.id == "layer_norm"
    if not isinstance(callee, ast.Attribute) or callee.attr != "layer_norm":
        return False
    receiver = function.args.args[0].arg if function.args.args else ""
    return not (isinstance(callee.value, ast.Name) and callee.value.id == receiver)
