"""RMSNorm: a class whose ``forward`` is one of the formulas of `veomni_hook.kernels.rms_norm.reference`.

`veomni_hook.patches.idioms.shared` routes it. An inherited ``forward`` counts for the class that defines it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.tree import called_attributes
from veomni_hook.patches.graph import ARGUMENT, FUNCTION, NUMBER
from veomni_hook.patches.idioms.shared import PARAMETER, forward_site, is_centred
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Site

__all__ = ["CANDIDATES", "OP", "WORDS", "find"]

OP = "rms_norm"
WORDS = "RMSNorm | mean( rsqrt( | mean( pow("
CANDIDATES = (
    "every class with a forward whose name contains RMSNorm, or whose forward (with the methods that it calls"
    " on itself) calls rsqrt or pow, and mean, and subtracts no mean; a class that inherits its forward"
    " counts with the class that defines it"
)

_RULES = {
    "hidden_states": ARGUMENT,
    "gate": ARGUMENT,
    "weight": PARAMETER,
    "eps": NUMBER,
    "group_size": NUMBER,
    "activation": FUNCTION,
}


def find(view: ModuleView) -> Iterator[Site]:
    """Every candidate of a module."""
    for owner, forward in view.forwards():
        if "RMSNorm" in owner.name or _looks_like_it(view, owner, forward):
            yield forward_site(OP, view, owner, forward, _RULES)


def _looks_like_it(view: ModuleView, owner: ast.ClassDef, forward: FunctionNode) -> bool:
    """Whether ``forward``, including the methods of the class that it calls, makes a class a candidate."""
    text = view.text(owner)
    if "mean(" not in text or not ("rsqrt(" in text or "pow(" in text):
        return False
    functions = [forward, *view.helpers(owner, forward).values()]
    names = {name for function in functions for name in called_attributes(function)}
    return "mean" in names and not names.isdisjoint(("rsqrt", "pow")) and not any(map(is_centred, functions))
