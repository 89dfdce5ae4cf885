"""A residual addition followed by torch's LayerNorm of the sum: two or three statements, one kernel.

    hidden_states = residual + hidden_states
    residual = hidden_states
    hidden_states = self.norm(hidden_states)

The statements are those of `veomni_hook.patches.idioms.add_rms_norm`, and ``self.norm`` is what
`veomni_hook.patches.idioms.nn_layer_norm` finds. If no kernel is used, upstream's statements run in the
guard's ``else``, where the call of the norm asks its own slot.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.edit import Edit
from veomni_hook.patches.idioms.add_rms_norm import Added, added_runs, guarded
from veomni_hook.patches.idioms.module_calls import own_calls
from veomni_hook.patches.idioms.nn_layer_norm import VARIANT, norms_by_class
from veomni_hook.patches.idioms.shared import gathered, has_self
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Code, Missed, Site, Status

__all__ = ["CANDIDATES", "OP", "WORDS", "find"]

OP = "add_layer_norm"
WORDS = "LayerNorm"
CANDIDATES = (
    "every method that assigns a sum to a name and in the next statement, or after one that copies the name, "
    "calls one of its own norms with it: an attribute to which __init__ assigns a call of torch's LayerNorm"
)


def find(view: ModuleView) -> Iterator[Site]:
    """Every candidate of a module."""
    for target, owner, method in view.every_method():
        norms = norms_by_class(view)[owner.name]
        if norms and method.name != "__init__" and has_self(method):
            if runs := [added for added in added_runs(method) if added.attribute in norms]:
                yield _site(view, target, method, runs, norms)


def _site(
    view: ModuleView, where: str, method: FunctionNode, runs: list[Added], norms: Mapping[str, object]
) -> Site:
    def routed(added: Added) -> tuple[str, tuple[Edit, ...]]:
        edits = guarded(view, method, added, (OP, VARIANT))
        if any(attribute in norms for attribute, _ in own_calls(added.run.statements[0])):
            said = "a summand calls a norm, which asks for its own kernel"
            raise Missed(said, added, Code.NO_FUSED_FORM)
        return f"self.{added.attribute}", edits

    every, reasons = gathered(runs, routed)
    if not every:
        return Site(OP, where, Status.MISSED, reason=reasons[0], lineno=runs[0].lineno)
    captures = {"norm": ", ".join(dict.fromkeys(norm for norm, _ in every))}
    edits = [edit for _, of_run in every for edit in of_run]
    return Site.asking(OP, where, VARIANT, runs[0], edits, reason="; ".join(reasons), captures=captures)
