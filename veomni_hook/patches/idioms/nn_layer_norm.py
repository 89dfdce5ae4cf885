"""Torch's ``nn.LayerNorm``: a kernel slot at the calls of a class's own norms.

    hidden_states = self.norm(hidden_states)  ->  hidden_states = slot.call(self, self.norm, hidden_states)

``self.norm`` is whatever ``__init__`` creates by calling ``nn.LayerNorm``. The slot checks at every call that
the object is exactly that, and that nothing observes its calls; else it calls the object.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import lru_cache, partial

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.scope import local_names
from veomni_hook.patches.code.tree import child_nodes, last_name, module_statements, walk_ast
from veomni_hook.patches.idioms.module_calls import Created, created_by, sites_of_calls
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Site

__all__ = ["CANDIDATES", "NORM", "OP", "VARIANT", "WORDS", "find", "norms_by_class"]

OP = "nn_layer_norm"
VARIANT = "rounded_once"
WORDS = "LayerNorm"
CANDIDATES = (
    "every method that calls one of its own attributes to which __init__ assigns a call of torch's LayerNorm,"
    " maybe in one branch of a condition; and every class whose __init__ uses torch's LayerNorm in another"
    " way: in a container, as an argument, from a dictionary of the file, or for an attribute that nothing"
    " calls"
)


def find(view: ModuleView) -> Iterator[Site]:
    """Every candidate of a module."""
    assigned = [node for node in module_statements(view.document.tree) if isinstance(node, ast.Assign)]
    holding = (node for node in assigned if any(_is_norm(view, part) for part in walk_ast(node.value)))
    collections = frozenset(
        target.id for node in holding for target in node.targets if isinstance(target, ast.Name)
    )
    uses = partial(_uses, view, collections)
    yield from sites_of_calls(view, (OP, VARIANT), "norm", norms_by_class(view), uses)


NORM = "torch.nn.LayerNorm"


@lru_cache(maxsize=2)
def norms_by_class(view: ModuleView) -> dict[str, Created]:
    """The attributes of each class to which ``__init__`` assigns a new LayerNorm; both idioms ask for them.

    An inherited ``__init__`` counts. In a conditional expression, one branch suffices.
    """
    norms: dict[str, Created] = {}
    for name, owner in view.classes.items():
        mentioned = "__init__" not in view.methods(owner) or "LayerNorm" in view.text(owner)
        norms[name] = created_by(view, owner, lambda call: _is_norm(view, call.func)) if mentioned else {}
    return norms


def _uses(
    view: ModuleView, collections: frozenset[str], _: ast.ClassDef, init: FunctionNode
) -> Iterator[tuple[ast.expr, str]]:
    """Where ``__init__`` uses LayerNorm, or one of the collections that hold it."""
    text = view.text(init)
    if not any(name in text for name in ("LayerNorm", *collections)):
        return
    hidden = local_names(init)
    for node in _names(init):
        if isinstance(node, ast.Name) and node.id in collections - hidden:
            yield node, f"{node.id} chooses the norm's class"
        elif _is_norm(view, node):
            yield node, "LayerNorm is part of another expression here"


def _is_norm(view: ModuleView, node: ast.AST) -> bool:
    return isinstance(node, ast.expr) and last_name(node) == "LayerNorm" and view.scope.dotted(node) == NORM


def _names(node: ast.AST) -> Iterator[ast.Name | ast.Attribute]:
    """Names and attributes in text order, without annotations and checks of a type."""
    if isinstance(node, (ast.Name, ast.Attribute)):
        yield node
        return
    if isinstance(node, ast.Call) and last_name(node.func) == "isinstance":
        return
    for child in child_nodes(node):
        if not isinstance(node, (ast.arg, ast.AnnAssign)) or child is getattr(node, "value", None):
            yield from _names(child)
