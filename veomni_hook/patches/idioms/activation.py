"""Activations of several operators: classes whose ``forward`` is a formula of the op's reference.

Most models take them from ``transformers.activations``. `veomni_hook.patches.idioms.shared` routes the class.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from veomni_hook.patches.code.scope import used_names
from veomni_hook.patches.code.tree import calls_in, last_name
from veomni_hook.patches.graph import ARGUMENT
from veomni_hook.patches.idioms.shared import forward_site
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Site

__all__ = ["CANDIDATES", "OP", "WORDS", "find"]

OP = "activation"
_CALLED = {"sigmoid", "square", "tanh"}
WORDS = "sigmoid( | square( | tanh("
CANDIDATES = (
    "every class whose forward takes one tensor, uses nothing of its instance, and calls sigmoid, square or"
    " tanh"
)


def find(view: ModuleView) -> Iterator[Site]:
    """Every candidate of a module."""
    for owner, forward in view.forwards():
        names = [argument.arg for argument in forward.args.args]
        called = {last_name(call.func) for call in calls_in(ast.Module(forward.body, []))}
        if len(names) == 2 and names[0] not in used_names(forward.body) and called & _CALLED:
            yield forward_site(OP, view, owner, forward, {"x": ARGUMENT})
