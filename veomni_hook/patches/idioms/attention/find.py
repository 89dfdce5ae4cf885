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
from veomni_hook.patches.graph import ARGUMENT, Difference, Form, canonical, digest, receiver_name, recognised
from veomni_hook.patches.routes.guards import in_place, parameters_as
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Code, Reason, Site, SlotSpec, Status, formula_slot
from veomni_hook.patterns import pattern_file

__all__ = ["CANDIDATES", "OP", "WORDS", "find"]

OP = "attention"
WORDS = "eager_attention_forward sinks | eager_attention_forward softcap"
CANDIDATES = "Every function named eager_attention_forward that mentions sinks or softcap."

_NAME = "eager_attention_forward"
_NOBODY = Reason("no method passes it to get_interface", Code.NO_OWNER)
_NO_MODULE = Reason("there is no module that a kernel could belong to", Code.NO_OWNER)
LOOK_UP = Template(f"HOME.get_interface(NAME, {_NAME})")
_MENTIONED = re.compile(r"sinks|softcap")
_REFERENCE = pattern_file(OP)


def find(view: ModuleView) -> Iterator[Site]:
    """The eager function of a module, and every method that passes it on as the default."""
    function = view.functions.get(_NAME)
    if function is None and _MENTIONED.search(view.document.source):
        yield from view.imported(OP, re.compile(f"^{_NAME}$"))
    if function is None or not _MENTIONED.search(view.text(function)):
        return
    known = _known(view, function)
    if isinstance(known, Reason):
        yield Site(OP, _NAME, Status.MISSED, reason=known, lineno=function.lineno)
        return
    form, slot = known
    uses = list(_uses(view, form, slot))
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


def _known(view: ModuleView, function: FunctionNode) -> tuple[Form, SlotSpec] | Reason:
    """What the function computes and the slot for it, or why it is not recognised."""
    if reason := view.why_unclear(function):
        return Reason(reason)
    form = canonical(function, view.scope)
    outcome = recognised(_REFERENCE, form, {}, otherwise=ARGUMENT)
    if isinstance(outcome, Difference):
        return outcome.why if isinstance(form, Form) else form
    assert isinstance(form, Form)  # noqa: S101
    variant, matched = outcome
    operands = {str(node.value): operand for operand, node in matched.bindings.items()}
    parameters = parameters_as(function, operands)
    if parameters is None or len(operands) != len(matched.bindings):
        said = f"it is {variant}, but its parameters do not define every operand"
        return Reason(said, Code.OTHER_ARGUMENTS)
    return form, formula_slot(OP, variant, parameters)


def _uses(view: ModuleView, form: Form, slot: SlotSpec) -> Iterator[Site]:
    """The sites of the methods that pass the function on as the default."""
    for target, _, method in view.every_method():
        receiver = receiver_name(method)
        for default in (call.args[1] for call in calls_in(method) if LOOK_UP.match(call)):
            known = bool(receiver) and view.text(default) == _NAME
            yield Site(
                OP,
                target,
                Status.ROUTED if known else Status.UNBOUND,
                slot.variant,
                reason="" if known else _NO_MODULE,
                form=digest(form),
                edits=(in_place(view, default, f"{slot.name}.at({receiver}, {_NAME})"),) if known else (),
                slots=(slot,) if known else (),
                relies_on=(_NAME,),
                skips={_NAME: form.inlined},
                counted=False,
                lineno=default.lineno,
            )
