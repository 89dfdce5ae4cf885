"""The load-balancing loss of a mixture of experts: the functions that compute it, and a slot at their calls.

Upstream writes the loss in several ways that agree up to rounding; `spellings.py` next to the reference lists
them. Only the callee of a call changes, to ``slot.at(self, callee)``, so that the kernel belongs to a module.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache

from veomni_hook.patches.graph import (
    ARGUMENT,
    Difference,
    Form,
    Match,
    Node,
    Scope,
    Unknown,
    canonical,
    digest,
    match,
    reference_scope,
)
from veomni_hook.patches.records import SlotSpec
from veomni_hook.patches.routes.site import Site, Status, slot_name
from veomni_hook.patches.routes.splice import in_place
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.structure.calls import Calls, CallSite
from veomni_hook.patches.structure.cases import Case
from veomni_hook.patches.structure.parameters import parameters_as
from veomni_hook.patches.structure.scope import parameter_names
from veomni_hook.patches.text.document import FunctionNode

__all__ = ["CANDIDATES", "OP", "find"]

OP = "load_balancing_loss"
CANDIDATES = "Every function whose name contains load_balancing_loss."
_NAME = "load_balancing_loss"
# Whether the logits are None, whether they are a tuple, whether the mask is None.
_CASES = ((True, False, True), (False, False, True), (False, True, True), (False, True, False))


def find(view: ModuleView) -> Sequence[Site]:
    """Every function of a module that may compute the loss, and every call of one."""
    if _NAME not in view.document.source:
        return ()
    # linear_cross_entropy needs these sites, too: its guard repeats the statements with these calls.
    if OP not in view.found:
        view.found[OP] = tuple(_sites(view))
    return view.found[OP]


def _sites(view: ModuleView) -> Iterator[Site]:
    functions = {name: node for name, node in view.functions.items() if _NAME in name}
    calls = Calls(view.document, functions)
    for name, node in functions.items():
        found = _known(view, node)
        if isinstance(found, Difference):
            yield Site(OP, name, Status.MISSED, reason=found.text, lineno=node.lineno)
            continue
        form, slot, inlined = found
        called = [_call(view, name, form, slot, site) for site in calls.sites(name)]
        sites = [replace(site, skips={name: inlined}) for site in called]
        bound = not sites or any(site.status is Status.ROUTED for site in sites)
        yield Site(
            OP,
            name,
            Status.ROUTED if bound else Status.UNBOUND,
            slot.variant,
            reason="" if sites and bound else "nothing calls it" if bound else sites[0].reason,
            form=form,
            lineno=node.lineno,
        )
        yield from sites


def _call(view: ModuleView, name: str, form: str, slot: SlotSpec, site: CallSite) -> Site:
    callee = ast.unparse(site.node)
    owned = bool(site.owner) and not site.only_if and view.text(site.node) == callee
    return Site(
        OP,
        site.where or name,
        Status.ROUTED if owned else Status.UNBOUND,
        slot.variant,
        reason="" if owned else site.reason or "its position in the source is unknown",
        form=form,
        splices=(in_place(view, site.node, f"{slot.name}.at({site.owner}, {callee})"),) if owned else (),
        slots=(slot,) if owned else (),
        relies_on=(name,),
        counted=False,
        lineno=site.node.lineno,
    )


def _known(view: ModuleView, function: FunctionNode) -> tuple[str, SlotSpec, tuple[str, ...]] | Difference:
    """The digest of a function that computes the loss, the slot for its calls, and what it calls."""
    if function.decorator_list:
        text = f"it is decorated with {ast.unparse(function.decorator_list[0])}"
        return Difference(text, 0.0, function.lineno)
    if view.scope.functions.get(function.name) is not function:
        return Difference("it is not the only definition of its name", 0.0, function.lineno)
    forms = _forms(function, view.scope)
    if isinstance(forms, Unknown):
        return Difference(f"{forms.reason} (line {forms.lineno})", 0.0, forms.lineno)
    nearest = Difference("it has other parameters", 0.0, function.lineno)
    for variant, spelling in _spellings():
        found = [_matched(one, other) for one, other in zip(spelling, forms, strict=True)]
        differences = [each for each in found if isinstance(each, Difference)]
        if not differences:
            operands = {str(node.value): name for each in found for name, node in _bindings(each).items()}
            parameters = parameters_as(function, operands)
            if parameters is not None and parameter_names(function) == operands.keys():
                slot = SlotSpec(slot_name(OP, variant), OP, variant, parameters)
                inlined = tuple(dict.fromkeys(name for form in forms for name in form.inlined))
                return "-".join(digest(form) for form in forms[2:]), slot, inlined
        elif differences[0].depth >= nearest.depth:
            nearest = differences[0]
    return nearest


def _matched(pattern: Form, found: Form) -> Match | Difference:
    return match(pattern, found, dict.fromkeys(pattern.arguments, ARGUMENT))


def _bindings(made: Match | Difference) -> Mapping[str, Node]:
    return made.bindings if isinstance(made, Match) else {}


@cache
def _spellings() -> tuple[tuple[str, tuple[Form, ...]], ...]:
    """The forms of every spelling, each with its variant."""
    found = []
    for path, variant in (("reference.py", ""), ("spellings.py", "softmax_topk")):
        scope = reference_scope(f"kernels/{OP}/{path}")
        for name, function in scope.functions.items():
            forms = _forms(function, scope)
            if not isinstance(forms, Unknown):
                found.append((variant or name, forms))
    return tuple(found)


def _forms(function: FunctionNode, scope: Scope) -> tuple[Form, ...] | Unknown:
    """The forms of a function for each case of `_CASES`: kinds of logits, with and without a mask."""
    parameters = [parameter.arg for parameter in function.args.args]
    if len(parameters) < 2:
        return Unknown("it takes no logits and mask", function.lineno)
    forms = []
    for absent, is_tuple, unmasked in _CASES:
        facts = {
            f"{parameters[0]} is None": absent,
            f"isinstance({parameters[0]}, tuple)": is_tuple,
            f"{parameters[-1]} is None": unmasked,
        }
        made = copy.copy(function)
        made.body = Case(facts).block(function.body)
        form = canonical(made, scope, body=made.body)
        if isinstance(form, Unknown):
            return form
        forms.append(form)
    return tuple(forms)
