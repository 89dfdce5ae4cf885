"""Rotary embedding: which formula each rotary function computes, and a kernel slot at each of its calls.

A function is recognised by what it computes, including everything that it calls. This distinguishes halves
from pairs, signs and casts even if the text is the same. Only the callee of a call changes, to
``slot.at(self, callee)``, so every form of call works. A method has a guard before its body.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from veomni_hook.patches.code.calls import Calls, CallSite
from veomni_hook.patches.code.document import Definition, FunctionNode
from veomni_hook.patches.code.tree import decorator_name
from veomni_hook.patches.graph import (
    TENSOR,
    Difference,
    Node,
    Rule,
    canonical,
    digest,
    receiver_name,
    recognised,
    reference_form,
    source,
)
from veomni_hook.patches.routes.guards import ask, before_body, in_place, parameters_as
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Code, Reason, Site, SlotSpec, Status, formula_slot, slot_name
from veomni_hook.patterns import pattern_file

__all__ = ["CANDIDATES", "OP", "WORDS", "find"]

OP = "rotary"
WORDS = "apply | Apply | APPLY"
CANDIDATES = "Every function and method whose name matches apply.*(rotary|rope)."

_NAME = re.compile(r"apply.*(rotary|rope)", re.IGNORECASE)
_MENTIONED = re.compile(r"apply\w*(?:rotary|rope)", re.IGNORECASE)
_REFERENCE = pattern_file(OP)
# Prefix of transformers' decorators that record a function for its own kernels.
_NOTES = "use_kernel"
# Some functions hard-code this value, others get it as an argument.
_PLACE = Rule("an argument or a literal", lambda node: node.op in ("argument", "constant"))


@dataclass(frozen=True, slots=True)
class _Known:
    """A formula: its site, without edits and slots, the nodes of its operands, and the slot's parameters."""

    site: Site
    bindings: Mapping[str, Node]
    parameters: str


def find(view: ModuleView) -> Iterator[Site]:
    """Every rotary function of a module, and every call of one."""
    if not _MENTIONED.search(view.document.source):
        return
    yield from view.imported(OP, _NAME)
    every = view.document.definitions()
    found = [d for d in every if isinstance(d.node, FunctionNode) and _NAME.search(d.node.name)]
    functions = [d for d in found if d.parents == (view.document.tree,)]
    known = {d.qualname: _known(view, d) for d in found}
    calls = Calls(view.document, [d.qualname for d in functions], notes=_NOTES)
    slots: dict[str, SlotSpec] = {}
    for definition in found:
        formula = known[definition.qualname]
        if isinstance(formula, Site):
            yield formula
        elif definition.kind == "method":
            yield _method(view, definition, formula)
        else:
            called = calls.sites(definition.qualname)
            yield _function(formula, called, known)
            slot = _slot(slots, formula)
            yield from (_call(view, formula, slot, site) for site in called)


def _slot(slots: dict[str, SlotSpec], known: _Known) -> SlotSpec:
    """A function's slot, which ``slots`` of its module gets; one for each formula with other parameters."""
    wanted = slot_name(OP, known.site.variant)
    for name in (wanted, f"{wanted}_{known.site.target}"):
        spec = SlotSpec(name, OP, known.site.variant, known.parameters)
        if slots.setdefault(name, spec) == spec:
            break
    return spec


def _function(known: _Known, called: list[CallSite], formulas: Mapping[str, _Known | Site]) -> Site:
    """The site of a function: routed, or unbound with the reason."""
    leaks = [site for site in called if site.leak]
    callers = {site.where for site in called}
    status, reason = Status.ROUTED, ""
    if leaks:
        status, reason = Status.UNBOUND, Reason(leaks[0].reason, Code.NO_OWNER, leaks[0].node.lineno)
    elif not called:
        reason = "nothing calls it"
    elif not any(site.owner for site in called):
        if all(isinstance(formulas.get(caller), _Known) for caller in callers):
            reason = f"nothing calls it but {', '.join(sorted(callers))}, whose own calls count"
        else:
            status, reason = Status.UNBOUND, Reason(called[0].reason, Code.NO_OWNER, called[0].node.lineno)
    return replace(known.site, status=status, reason=reason)


def _call(view: ModuleView, known: _Known, slot: SlotSpec, site: CallSite) -> Site:
    """The site of a call: the new callee asks the slot."""
    function = known.site.target
    row = replace(known.site, target=site.where or function, counted=False, lineno=site.node.lineno)
    callee = ast.unparse(site.node)
    if not site.owner:
        return replace(row, status=Status.UNBOUND, reason=Reason(site.reason, Code.NO_OWNER))
    text = f"{slot.name}.at({site.owner}, {callee})"
    if site.only_if:
        text = f"({text} if {callee} is {site.only_if} else {callee})"
    return replace(row, edits=(in_place(view, site.node, text),), slots=(slot,), relies_on=(function,))


def _method(view: ModuleView, definition: Definition, known: _Known) -> Site:
    """The site of a method, with a guard before its body."""
    node, variant = definition.node, known.site.variant
    assert isinstance(node, FunctionNode)  # noqa: S101
    receiver = receiver_name(node)
    slot = formula_slot(OP, variant)
    code = ask(node, slot.name, receiver, [source(bound, receiver) for bound in known.bindings.values()])
    return replace(known.site, edits=before_body(view, node, code, f"{OP}/{variant}"), slots=(slot,))


def _known(view: ModuleView, definition: Definition) -> _Known | Site:
    """What a candidate computes, or a missed site with the reason."""
    node = definition.node
    assert isinstance(node, FunctionNode)  # noqa: S101
    owner = definition.parents[-1]
    missed = Site(OP, definition.qualname, Status.MISSED, lineno=node.lineno)
    reason = _unsuited(view, definition)
    if reason:
        return replace(missed, reason=reason)
    form = canonical(node, view.scope, owner if isinstance(owner, ast.ClassDef) else None)
    if isinstance(form, Reason):
        return replace(missed, reason=form)
    outcome = recognised(_REFERENCE, form, {"unsqueeze_dim": _PLACE}, otherwise=TENSOR)
    if isinstance(outcome, Difference):
        return replace(missed, reason=outcome.why, form=digest(form))
    name, matched = outcome
    bindings = {operand: matched.bindings[operand] for operand in reference_form(_REFERENCE, name).arguments}
    parameters = "" if form.receiver else _parameters(node, bindings)
    if parameters is None:
        said = f"it is {name}, but its parameters do not define every operand"
        return replace(missed, reason=Reason(said, Code.OTHER_ARGUMENTS))
    site = replace(
        missed,
        status=Status.ROUTED,
        variant=name.partition("__")[0],
        form=digest(form),
        captures={key: source(value) for key, value in bindings.items() if source(value) != key},
        skips={definition.qualname: form.inlined},
    )
    return _Known(site, bindings, parameters)


def _unsuited(view: ModuleView, definition: Definition) -> str:
    """Why a candidate is not analysed; empty if it is."""
    node, parent = definition.node, definition.parents[-1]
    assert isinstance(node, FunctionNode)  # noqa: S101
    for decorator in node.decorator_list:
        if not decorator_name(decorator).startswith(_NOTES):
            return Reason(f"it is decorated with {ast.unparse(decorator)}", Code.DECORATED)
    if isinstance(parent, ast.ClassDef):
        return "" if receiver_name(node) else Reason("a method without an instance", Code.NO_OWNER)
    if view.scope.functions.get(node.name) is not node:
        return Reason("it is not the only definition of its name, at the top level", Code.REPLACED)
    return ""


def _parameters(function: FunctionNode, bindings: Mapping[str, Node]) -> str | None:
    """Upstream's parameter list with the names of operands; None if it does not define all operands."""
    arguments: dict[str, str] = {}
    for operand, node in bindings.items():
        if node.op == "argument" and arguments.setdefault(str(node.value), operand) != operand:
            return None  # one argument for two operands
    fixed = {operand: node.value for operand, node in bindings.items() if node.op == "constant"}
    return parameters_as(function, arguments, fixed)
