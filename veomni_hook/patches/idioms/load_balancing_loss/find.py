"""The load-balancing loss of a mixture of experts: the functions that compute it, and a slot at their calls.

Upstream writes the loss in several ways that agree up to rounding; `spellings.py` next to the reference lists
them. Only the callee of a call changes, to ``slot.at(self, callee)``, so that the kernel belongs to a module.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from veomni_hook.patches.code.calls import Calls, CallSite
from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.scope import parameter_names
from veomni_hook.patches.graph import (
    ARGUMENT,
    Difference,
    Form,
    Match,
    Node,
    Unknown,
    digest,
    match,
)
from veomni_hook.patches.idioms.load_balancing_loss.read import OP, forms, spellings
from veomni_hook.patches.routes.guards import in_place, parameters_as
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Code, Reason, Site, SlotSpec, Status, formula_slot

__all__ = ["CANDIDATES", "OP", "find"]

CANDIDATES = "Every function whose name contains load_balancing_loss."
_NAME = re.compile("load_balancing_loss")


def find(view: ModuleView) -> Iterator[Site]:
    """Every function of a module that may compute the loss, and every call of one."""
    functions = {name: node for name, node in view.functions.items() if _NAME.search(name)}
    yield from view.imported(OP, _NAME)
    calls = Calls(view.document, functions)
    for name, node in functions.items():
        found = _known(view, node)
        if isinstance(found, Reason):
            yield Site(OP, name, Status.MISSED, reason=found, lineno=node.lineno)
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
        reason="" if owned else Reason(site.reason or "its position in the source is unknown", Code.NO_OWNER),
        form=form,
        edits=(in_place(view, site.node, f"{slot.name}.at({site.owner}, {callee})"),) if owned else (),
        slots=(slot,) if owned else (),
        relies_on=(name,),
        counted=False,
        lineno=site.node.lineno,
    )


def _known(view: ModuleView, function: FunctionNode) -> tuple[str, SlotSpec, tuple[str, ...]] | Reason:
    """The digest of a function that computes the loss, the slot for its calls, and what it calls."""
    if reason := view.why_unclear(function):
        return Reason(reason)
    found = forms(function, view.scope)
    if isinstance(found, Unknown):
        return found.why
    nearest = None
    for variant, spelling in spellings():
        matches = [_matched(one, other) for one, other in zip(spelling, found, strict=True)]
        differences = [each for each in matches if isinstance(each, Difference)]
        if not differences:
            operands = {str(node.value): name for each in matches for name, node in _bindings(each).items()}
            parameters = parameters_as(function, operands)
            if parameters is not None and parameter_names(function) == operands.keys():
                slot = formula_slot(OP, variant, parameters)
                inlined = tuple(dict.fromkeys(name for form in found for name in form.inlined))
                return "-".join(digest(form) for form in found[2:]), slot, inlined
        elif nearest is None or differences[0].depth >= nearest.depth:
            nearest = differences[0]
    return nearest.why if nearest else Reason("it has other parameters", Code.OTHER_ARGUMENTS)


def _matched(pattern: Form, found: Form) -> Match | Difference:
    return match(pattern, found, dict.fromkeys(pattern.arguments, ARGUMENT))


def _bindings(made: Match | Difference) -> Mapping[str, Node]:
    return made.bindings if isinstance(made, Match) else {}
