"""What idioms share whose code is one of the formulas of a reference as a whole, as norms are.

For a class, the guard is inserted before the body of ``forward``. If a flag of the instance chooses between
formulas, each has its own guard under the flag's test. A method that ``forward`` calls is followed unless a
class of the file overrides it.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import takewhile

from veomni_hook.patches.code.document import FunctionNode, statements_of
from veomni_hook.patches.code.scope import bound_names, used_names
from veomni_hook.patches.code.tree import bound_once, called_attributes, substituted, walk_ast
from veomni_hook.patches.graph import (
    ANY,
    Difference,
    Form,
    Match,
    Node,
    Rule,
    Unknown,
    branches,
    canonical,
    digest,
    has_source,
    recognised,
    reference_form,
    source,
)
from veomni_hook.patches.routes.guards import ask, before_body, before_statement
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Code, Missed, Reason, Site, Status, slot_name
from veomni_hook.patterns import pattern_file

__all__ = ["PARAMETER", "formula_of", "forward_site", "is_centred"]


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
    if isinstance(form, Unknown):
        raise Missed(form.why)
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
    if isinstance(form, Unknown):
        return missed(reason=form.why)
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
