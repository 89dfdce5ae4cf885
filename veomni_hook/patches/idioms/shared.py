"""What idioms share: formulas of references, places where code asks for a kernel, uses of functions.

Of a class whose ``forward`` is one of the formulas, as norms are, the guard is inserted before the body. If a
flag of the instance chooses between formulas, each has its own guard under the flag's test. A method that
``forward`` calls is followed unless a class of the file overrides it.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import Any, TypeVar

from veomni_hook.patches.code.document import FunctionNode, statements_of
from veomni_hook.patches.code.scope import bound_names, local_names, own_names, used_names
from veomni_hook.patches.code.tree import bound_once, called_attributes, substituted, walk_ast
from veomni_hook.patches.graph import (
    ANY,
    Difference,
    Form,
    Match,
    Node,
    Rule,
    branches,
    canonical,
    digest,
    has_source,
    recognised,
    reference_form,
    source,
)
from veomni_hook.patches.routes.guards import ask, before_body, before_statement, in_place
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Code, Missed, Reason, Site, SlotSpec, Status, slot_name
from veomni_hook.patterns import pattern_file

__all__ = [
    "PARAMETER",
    "at_use",
    "check_self",
    "check_torch",
    "formula_of",
    "forward_site",
    "gathered",
    "has_receiver",
    "has_self",
    "is_centred",
]

_Place = TypeVar("_Place")
_Result = TypeVar("_Result")


def _is_parameter(node: Node) -> bool:
    return node.op == "attribute" or (
        node.op == "to_device" and node.args[0].op == "attribute" and has_source(node)
    )


#: A weight or a bias.
PARAMETER = Rule("an attribute of self", _is_parameter)


def formula_of(
    op: str,
    view: ModuleView,
    owner: ast.ClassDef | None,
    function: FunctionNode,
    rules: Mapping[str, Rule],
    *,
    names: Sequence[str] = (),
    otherwise: Rule = ANY,
) -> tuple[Form, str, Match]:
    """The form of a function, or of a method of ``owner``, and the formula of ``op`` that it is.

    What follows ``function`` is as for `recognised`.

    Raises:
        Missed: it is none.
    """
    form = canonical(function, view.scope, owner)
    if isinstance(form, Reason):
        raise Missed(form)
    outcome = recognised(pattern_file(op), form, rules, names=names, otherwise=otherwise)
    if isinstance(outcome, Difference):
        other = Reason("its result has another form", Code.OTHER_FORM, function.lineno)
        raise Missed(outcome.why or other)
    return form, *outcome


#: A formula, its operands as source text, and the tests under which the code computes it.
_Route = tuple[str, dict[str, str], list[str]]


def forward_site(
    op: str, view: ModuleView, owner: ast.ClassDef, forward: FunctionNode, rules: Mapping[str, Rule]
) -> Site:
    """The site of a class's ``forward``, routed if it is a formula of ``op``; ``rules`` are its operands'."""
    target = f"{owner.name}.forward"
    missed = partial(Site, op, target, Status.MISSED, lineno=forward.lineno)
    body = statements_of(forward)
    checks = len([*takewhile(_only_raises, body[:-1])])
    form = canonical(forward, view.scope, owner, body=body[checks:] if checks else None)
    if isinstance(form, Reason):
        return missed(reason=form)
    routes = _routes(op, form, rules)
    if isinstance(routes, Difference):
        return missed(reason=routes.why, form=digest(form))
    variants = list(dict.fromkeys(variant for variant, _, _ in routes))
    code = "\n".join(
        ask(forward, slot_name(op, variant), form.receiver, list(operands.values()), tests)
        for variant, operands, tests in routes
    )
    comment = f"{op}/{'|'.join(variants)}"
    return Site.asking(
        op,
        target,
        variants,
        forward,
        before_statement(view, forward, body[checks], code, comment)
        if checks
        else before_body(view, forward, code, comment),
        form=digest(form),
        captures={name: text for _, operands, _ in routes for name, text in operands.items()},
        relies_on=form.inlined,
        skips={target: form.inlined} if form.inlined else {},
    )


def _only_raises(statement: ast.stmt) -> bool:
    """Whether a statement is a check."""
    if isinstance(statement, ast.If):
        return not statement.orelse and all(isinstance(inner, ast.Raise) for inner in statement.body)
    return isinstance(statement, ast.Assert)


def _routes(op: str, form: Form, rules: Mapping[str, Rule]) -> list[_Route] | Difference:
    """One route for the whole form, or one for each formula that tests choose between."""
    whole = _route(op, form, rules)
    leaves = branches(form)
    if not isinstance(whole, Difference) or len(leaves) == 1 or form.effects:
        return whole if isinstance(whole, Difference) else [whole]
    routes = []
    for leaf in leaves:
        route = _route(op, Form(form.arguments, leaf.node, (), (), form.receiver), rules)
        if isinstance(route, Difference):
            return route
        if not all(has_source(test) for test, _ in leaf.tests):
            return Difference("the test that chooses the formula cannot be evaluated before the body", 0.0)
        tests = []
        for test, outcome in leaf.tests:
            text = source(test, form.receiver)
            tests.append(text if outcome else f"not ({text})" if " " in text else f"not {text}")
        routes.append((*route[:2], tests))
    return routes


def _route(op: str, form: Form, rules: Mapping[str, Rule]) -> _Route | Difference:
    reference = pattern_file(op)
    outcome = recognised(reference, form, rules)
    if isinstance(outcome, Difference):
        return outcome
    variant, matched = outcome
    names = reference_form(reference, variant).arguments
    operands = {name: source(matched.bindings[name], form.receiver) for name in names}
    if len({*operands.values()}) < len(operands):
        return Difference(f"nearest is {variant}: one value is used for two operands", 1.0, form.lineno)
    return variant, operands, []


def is_centred(function: FunctionNode) -> bool:
    """Whether the function subtracts a mean, or a name that holds one."""
    nodes = list(walk_ast(function))
    values = bound_once(nodes)
    assigned = [(n, {*called_attributes(n.value)}) for n in nodes if isinstance(n, ast.Assign)]
    means = bound_names(n for n, called in assigned if called & {"mean", "pow", "square"} == {"mean"})
    subtracted = [n.right for n in nodes if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Sub)]
    subtracted = [substituted(node, values) for node in subtracted]
    return any("mean" in called_attributes(n) or used_names([n]) & means for n in subtracted)


def has_self(function: FunctionNode) -> bool:
    """Whether the first parameter of a function is ``self``."""
    return bool(function.args.args) and function.args.args[0].arg == "self"


def has_receiver(function: FunctionNode) -> bool:
    """Whether a method has parameters, all with names for callers; searches take the first for ``self``."""
    return bool(function.args.args) and not function.args.posonlyargs


def check_self(function: FunctionNode, place: object = None) -> None:
    """Raise `Missed`, with the line of ``place``, unless ``self`` is the module everywhere in a function."""
    if not has_self(function) or "self" in own_names(function.body):
        raise Missed("self is not the method's module", place, Code.REPLACED)


def check_torch(view: ModuleView, function: FunctionNode, place: object = None) -> None:
    """Raise `Missed`, with the line of ``place``, unless ``torch`` is torch in a function."""
    if view.scope.resolve("torch") != "torch" or "torch" in local_names(function):
        raise Missed("torch has another name here", place, Code.REPLACED)


def gathered(
    places: Iterable[_Place], route: Callable[[_Place], _Result]
) -> tuple[list[_Result], list[Reason]]:
    """What ``route`` returns for the places that it can route, and why it raises `Missed` for the others."""
    results, reasons = [], []
    for place in places:
        try:
            results.append(route(place))
        except Missed as missed:
            reasons.append(missed.reason)
    return results, reasons


def at_use(
    view: ModuleView, slot: SlotSpec, where: str, node: ast.expr, owner: str, why: str, **more: Any
) -> Site:
    """The site of a use of a function, which belongs to a candidate: ``slot`` stands in its place.

    Args:
        view: the module.
        slot: the function's slot.
        where: what has the use.
        node: the use.
        owner: the name of the module there; empty if there is none, or the code is not what ``node`` says.
        why: the reason then.
        more: other fields of the site.
    """
    site = Site(slot.op, where, Status.UNBOUND, slot.variant, why, counted=False, lineno=node.lineno, **more)
    if not owner:
        return site
    edit = in_place(view, node, f"{slot.name}.at({owner}, {ast.unparse(node)})")
    return replace(site, status=Status.ROUTED, reason="", edits=(edit,), slots=(slot,))
