"""Eager attention with sinks or a softcap: the function that computes it, and a slot where it is the default.

transformers' attention modules look their function up by the name of an implementation, and pass their own
eager function as the default: ``ALL_ATTENTION_FUNCTIONS.get_interface(name, eager_attention_forward)``. Only
this default changes, to ``slot.at(self, eager_attention_forward)``. So the slot is asked only where upstream
would run its eager function; every other implementation stays untouched.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.template import Template
from veomni_hook.patches.code.tree import calls_in
from veomni_hook.patches.graph import ARGUMENT, Form, digest, receiver_name
from veomni_hook.patches.idioms.shared import at_use, formula_of
from veomni_hook.patches.routes.guards import parameters_as
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Code, Missed, Reason, Site, SlotSpec, Status, formula_slot

__all__ = ["CANDIDATES", "OP", "WORDS", "find"]

OP = "attention"
WORDS = "eager_attention_forward sinks | eager_attention_forward softcap"
CANDIDATES = "Every function named eager_attention_forward that mentions sinks or softcap."

_NAME = "eager_attention_forward"
_NOBODY = Reason("no method passes it to get_interface", Code.NO_OWNER)
_NO_MODULE = Reason("there is no module that a kernel could belong to", Code.NO_OWNER)
LOOK_UP = Template(f"HOME.get_interface(NAME, {_NAME})")
_MENTIONED = re.compile(r"sinks|softcap")


def find(view: ModuleView) -> Iterator[Site]:
    """The eager function of a module, and every method that passes it on as the default."""
    function = view.functions.get(_NAME)
    if function is None and _MENTIONED.search(view.document.source):
        yield from view.imported(OP, re.compile(f"^{_NAME}$"))
    if function is None or not _MENTIONED.search(view.text(function)):
        return
    try:
        form, slot = _known(view, function)
    except Missed as missed:
        yield Site(OP, _NAME, Status.MISSED, reason=missed.reason, lineno=function.lineno)
        return
    more = {"form": digest(form), "relies_on": (_NAME,), "skips": {_NAME: form.inlined}}
    uses = []
    for target, _, method in view.every_method():
        for default in (call.args[1] for call in calls_in(method) if LOOK_UP.match(call)):
            owner = receiver_name(method) if view.text(default) == _NAME else ""
            uses.append(at_use(view, slot, target, default, owner, _NO_MODULE, **more))
    routed = any(use.status is Status.ROUTED for use in uses)
    reason = "" if routed else uses[0].reason if uses else _NOBODY
    yield Site(
        OP,
        _NAME,
        Status.ROUTED if routed else Status.UNBOUND,
        slot.variant,
        reason=reason,
        form=digest(form),
        lineno=function.lineno,
    )
    yield from uses


def _known(view: ModuleView, function: FunctionNode) -> tuple[Form, SlotSpec]:
    """What the function computes, and the slot for it; raises `Missed` if it is not recognised."""
    if reason := view.why_unclear(function):
        raise Missed(reason)
    form, variant, matched = formula_of(OP, view, None, function, {}, otherwise=ARGUMENT)
    operands = {str(node.value): operand for operand, node in matched.bindings.items()}
    parameters = parameters_as(function, operands)
    if parameters is None or len(operands) != len(matched.bindings):
        said = f"it is {variant}, but its parameters do not define every operand"
        raise Missed(said, code=Code.OTHER_ARGUMENTS)
    return form, formula_slot(OP, variant, parameters)
