"""RMSNorm: ``forward`` of a class, as one of the formulas of `veomni_hook.kernels.rms_norm.reference`.

The guard stands in front of the body. Where a flag of the instance chooses between formulas, each has its own
guard under the flag's test. A `forward` that a class of the file inherits is found where it is defined; a
method that it calls is followed unless a class of the file overrides it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from veomni_hook.patches.graph import (
    ARGUMENT,
    FUNCTION,
    NUMBER,
    Form,
    Match,
    Node,
    Rule,
    Unknown,
    branches,
    canonical,
    digest,
    match,
    reference_form,
    source,
)
from veomni_hook.patches.graph import (
    find as occurrences,
)
from veomni_hook.patches.graph.text import brief, can_be_said
from veomni_hook.patches.idioms.site import Site, Status, slot_name
from veomni_hook.patches.idioms.splice import before_body, before_statement, free_name
from veomni_hook.patches.idioms.view import ModuleView
from veomni_hook.patches.records import SlotSpec
from veomni_hook.patches.text.document import FunctionNode, has_docstring

__all__ = ["CANDIDATES", "OP", "find"]

OP = "rms_norm"
CANDIDATES = (
    "every class with a forward whose name contains RMSNorm, or whose forward (with the methods that it calls"
    " on itself) calls rsqrt or pow, and mean, and subtracts no mean; a class that inherits its forward"
    " counts with the class that defines it"
)

_REFERENCE = "kernels/rms_norm/reference.py"
_VARIANTS = (
    "cast_before_weight",
    "weight_before_cast",
    "one_plus_weight",
    "one_plus_weight_rounded",
    "one_plus_weight_before_norm",
    "one_plus_weight_grouped",
    "unweighted",
    "unweighted_rounded_scale",
    "inverse_rms",
    "cast_before_weight_gated",
    "weight_before_cast_gated",
    "gate_before_norm",
    "gate_before_norm_grouped",
    "cast_to_weight",
    "without_cast",
    "divided_by_root",
)


def _is_weight(node: Node) -> bool:
    return node.op == "attribute" or (
        node.op == "to_device" and node.args[0].op == "attribute" and can_be_said(node)
    )


_RULES = {
    "hidden_states": ARGUMENT,
    "gate": ARGUMENT,
    "weight": Rule("an attribute of self", _is_weight),
    "eps": NUMBER,
    "group_size": NUMBER,
    "activation": FUNCTION,
}


@dataclass(frozen=True, slots=True)
class _Route:
    """A formula that was recognised, and the tests under which it is what the code computes."""

    variant: str
    tests: tuple[tuple[Node, bool], ...]
    bindings: dict[str, str]


@dataclass(frozen=True, slots=True)
class _Miss:
    reason: str
    depth: float = 0.0


def find(view: ModuleView) -> Iterator[Site]:
    """Every candidate of a module."""
    text = view.document.source
    if "RMSNorm" not in text and not ("mean(" in text and ("rsqrt(" in text or "pow(" in text)):
        return
    for owner, forward in view.forwards():
        if "RMSNorm" in owner.name or _looks_like_it(view, owner, forward):
            yield _site(view, owner, forward)


def _site(view: ModuleView, owner: ast.ClassDef, forward: FunctionNode) -> Site:
    target = f"{owner.name}.forward"
    checks, body = _after_checks(forward)
    form = canonical(forward, view.scope, owner, body=body if checks else None)
    if isinstance(form, Unknown):
        reason = f"{form.reason} (line {form.lineno})"
        return Site(OP, target, Status.MISSED, reason=reason, lineno=forward.lineno)
    routes = _routes(form)
    if isinstance(routes, _Miss):
        return Site(OP, target, Status.MISSED, reason=routes.reason, form=digest(form), lineno=forward.lineno)
    code = "\n".join(_guard(route, form.receiver, free_name(forward, "kernel")) for route in routes)
    variants = list(dict.fromkeys(route.variant for route in routes))
    comment = f"{OP}/{'|'.join(variants)}"
    place = (
        before_statement(view, forward, body[0], code, comment)
        if checks
        else before_body(view, forward, code, comment)
    )
    return Site(
        OP,
        target,
        Status.ROUTED,
        variant="|".join(variants),
        form=digest(form),
        captures={name: text for route in routes for name, text in route.bindings.items()},
        splices=place,
        slots=tuple(SlotSpec(slot_name(OP, variant), OP, variant) for variant in variants),
        relies_on=form.inlined,
        lineno=forward.lineno,
    )


def _after_checks(forward: FunctionNode) -> tuple[bool, Sequence[ast.stmt]]:
    """The body without checks that only raise in front of it, and whether there are any."""
    body = forward.body[1:] if has_docstring(forward) else forward.body
    count = 0
    while count < len(body) - 1 and _only_raises(body[count]):
        count += 1
    return bool(count), body[count:]


def _only_raises(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.If):
        return not statement.orelse and all(isinstance(inner, ast.Raise) for inner in statement.body)
    return isinstance(statement, ast.Assert)


def _routes(form: Form) -> list[_Route] | _Miss:
    """One route for the whole form, or one for each formula that tests choose between."""
    whole = _recognised(form, ())
    if isinstance(whole, _Route):
        return [whole]
    leaves = branches(form)
    if len(leaves) == 1 or form.effects:
        return whole
    routes = []
    for leaf in leaves:
        found = _recognised(Form(form.arguments, leaf.node, (), (), form.receiver), leaf.tests)
        if isinstance(found, _Miss):
            return found
        if not all(can_be_said(test) for test, _ in leaf.tests):
            return _Miss("the test that chooses the formula is not known before the body")
        routes.append(found)
    return routes


def _recognised(form: Form, tests: tuple[tuple[Node, bool], ...]) -> _Route | _Miss:
    nearest = _Miss("", -1.0)
    for variant, pattern in _patterns():
        made = match(pattern, form, _RULES)
        if isinstance(made, Match):
            bindings = {name: source(made.bindings[name], form.receiver) for name in pattern.arguments}
            return _Route(variant, tests, bindings)
        if made.depth > nearest.depth:
            nearest = _Miss(f"nearest: {variant}; {made.text}", made.depth)
    if nearest.depth > 0:
        return nearest
    for variant, pattern in _patterns():
        if any(occurrences(pattern, form, _RULES)):
            found = f"{brief(form.result)} (line {form.result.lineno})"
            return _Miss(f"nearest: {variant}; expected nothing after it, found {found}")
    return nearest


@cache
def _patterns() -> tuple[tuple[str, Form], ...]:
    return tuple((variant, reference_form(_REFERENCE, variant)) for variant in _VARIANTS)


def _guard(route: _Route, receiver: str, kernel: str) -> str:
    operands = ", ".join(route.bindings.values())
    # An activation may be made anew whenever it is looked up; the slot can be asked without it.
    asked = ", ".join(text for name, text in route.bindings.items() if name != "activation")
    texts = [(source(test, receiver), outcome) for test, outcome in route.tests]
    conditions = [
        text if outcome and " or " not in text else f"{'' if outcome else 'not '}({text})"
        for text, outcome in texts
    ]
    slot = slot_name(OP, route.variant)
    conditions.append(f"({kernel} := {slot}.kernel({receiver}, {asked})) is not None")
    return f"if {' and '.join(conditions)}:\n    return {kernel}({operands})"


def _looks_like_it(view: ModuleView, owner: ast.ClassDef, forward: FunctionNode) -> bool:
    """Whether ``forward``, with the methods that it calls on itself, makes a class a candidate."""
    text = view.text(owner)
    if "mean(" not in text or not ("rsqrt(" in text or "pow(" in text):
        return False
    methods = view.methods(owner)
    functions = {"forward": forward}
    functions.update((name, methods[name]) for name in _called(forward) if name in methods)
    names = {name for function in functions.values() for name in _called(function)}
    centred = any(_is_centred(function) for function in functions.values())
    return "mean" in names and not names.isdisjoint(("rsqrt", "pow")) and not centred


def _called(function: ast.AST) -> Iterator[str]:
    """The names after the dot of everything that is called as one."""
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield node.func.attr


def _is_centred(function: FunctionNode) -> bool:
    """Whether a mean, or a name that holds one, is subtracted."""
    means = {
        target.id
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and "mean" in _called(node.value)
        for target in node.targets
        if isinstance(target, ast.Name) and not _squares(node.value)
    }
    for node in ast.walk(function):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub):
            names = {inner.id for inner in ast.walk(node.right) if isinstance(inner, ast.Name)}
            if "mean" in _called(node.right) or not names.isdisjoint(means):
                return True
    return False


def _squares(node: ast.expr) -> bool:
    return not {"pow", "square"}.isdisjoint(_called(node))
