"""LayerNorm: a class whose ``forward`` is one of the formulas of `veomni_hook.kernels.layer_norm.reference`.

`veomni_hook.patches.idioms.shared` routes it. An inherited ``forward`` counts for the class that defines it.
"""

from __future__ import annotations

from collections.abc import Iterator

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.tree import calls_in, chain, last_name
from veomni_hook.patches.graph import ARGUMENT, ATTRIBUTE, NUMBER, receiver_name
from veomni_hook.patches.idioms.shared import PARAMETER, forward_site, is_centred
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
        if "LayerNorm" in owner.name:
            functions = [forward, *view.helpers(owner, forward).values()]
            if any(is_centred(function) or _calls_operator(function) for function in functions):
                yield forward_site(OP, view, owner, forward, _RULES)


def _calls_operator(function: FunctionNode) -> bool:
    """Whether a function calls torch's layer_norm; an attribute of self may be any module."""
    own = f"{receiver_name(function)}.layer_norm"
    named = (call.func for call in calls_in(function) if last_name(call.func) == "layer_norm")
    return any(chain(callee) != own for callee in named)
