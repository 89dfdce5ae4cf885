"""The load-balancing loss of a mixture of experts: the functions that compute it, and a slot at their calls.

Upstream writes the loss in several ways that agree up to rounding; `spellings.py` next to the reference lists
them. Only the callee of a call changes, to ``slot.at(self, callee)``, so that the kernel belongs to a module.

A function is read in each case, without the branches decided there. List comprehensions become loops, and
in-place additions to a new tensor out-of-place ones, so that the canonical form can follow them.
"""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterator, Mapping
from functools import cache

from veomni_hook.patches.code.calls import Calls
from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.scope import parameter_names
from veomni_hook.patches.code.tree import chain, walk_ast
from veomni_hook.patches.graph import (
    ARGUMENT,
    Difference,
    Form,
    Match,
    Scope,
    canonical,
    digest,
    match,
    reference_scope,
)
from veomni_hook.patches.idioms.shared import at_use
from veomni_hook.patches.routes.guards import parameters_as
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Code, Missed, Reason, Site, SlotSpec, Status, formula_slot
from veomni_hook.patterns import pattern_file

__all__ = ["CANDIDATES", "OP", "WORDS", "Case", "find", "forms", "spellings"]

OP = "load_balancing_loss"
WORDS = "load_balancing_loss"
CANDIDATES = "Every function whose name contains load_balancing_loss."

_IN_PLACE = "scatter_add_"
# Whether the logits are None, whether they are a tuple, whether the mask is None.
_CASES = ((True, False, True), (False, False, True), (False, True, True), (False, True, False))


@cache
def spellings() -> tuple[tuple[str, tuple[Form, ...]], ...]:
    """The forms of every spelling, each with its variant."""
    spelled = []
    for path, variant in (("reference.py", ""), ("spellings.py", "softmax_topk")):
        scope = reference_scope(pattern_file(OP, path))
        for name, function in scope.functions.items():
            spelling = forms(function, scope)
            if not isinstance(spelling, Reason):
                spelled.append((variant or name, spelling))
    return tuple(spelled)


def forms(function: FunctionNode, scope: Scope) -> tuple[Form, ...] | Reason:
    """The forms of a function for each case of `_CASES`: kinds of logits, with and without a mask."""
    parameters = [parameter.arg for parameter in function.args.args]
    if len(parameters) < 2:
        return Reason("it takes no logits and mask", line=function.lineno)
    by_case = []
    for absent, is_tuple, unmasked in _CASES:
        facts = {
            f"{parameters[0]} is None": absent,
            f"isinstance({parameters[0]}, tuple)": is_tuple,
            f"{parameters[-1]} is None": unmasked,
        }
        special = copy.copy(function)
        special.body = Case(facts).block(function.body)
        form = canonical(special, scope, body=special.body)
        if isinstance(form, Reason):
            return form
        by_case.append(form)
    return tuple(by_case)


class Case(ast.NodeTransformer):
    """Rewrites a function for one case: drops decided tests and turns list comprehensions into loops.

    The input does not change; changed nodes are copies.

    Args:
        facts: tests as text, with their outcomes.
    """

    def __init__(self, facts: Mapping[str, bool]) -> None:
        self.facts = facts
        self.before: list[ast.stmt] = []
        self.count = 0

    def block(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        """The remaining statements of a block."""
        rewritten: list[ast.stmt] = []
        for statement in statements:
            outcome = self.outcome(statement.test) if isinstance(statement, ast.If) else None
            if isinstance(statement, ast.If) and outcome is not None:
                rewritten += self.block(statement.body if outcome else statement.orelse)
                continue
            written = self._written(statement)
            rewritten += [*self.before, written]
            self.before = []
        return rewritten

    def _written(self, statement: ast.stmt) -> ast.stmt:
        if hasattr(statement, "body"):
            clone = copy.copy(statement)
            for name in ("body", "orelse"):
                if inner := getattr(statement, name, None):
                    setattr(clone, name, self.block(inner))
            return clone
        for node in walk_ast(statement):
            if isinstance(node, ast.ListComp) or getattr(node, "attr", "") == _IN_PLACE:
                written: ast.stmt = self.visit(copy.deepcopy(statement))
                return written
        return statement

    def outcome(self, test: ast.expr) -> bool | None:
        """The outcome of a test according to the facts; None if it is unknown."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            inner = self.outcome(test.operand)
            return None if inner is None else not inner
        if isinstance(test, ast.BoolOp):
            decisive = isinstance(test.op, ast.Or)
            outcomes = [self.outcome(value) for value in test.values]
            return decisive if decisive in outcomes else None if None in outcomes else not decisive
        text = ast.unparse(test)
        negated = text.replace(" is not ", " is ")
        return not self.facts[negated] if text != negated and negated in self.facts else self.facts.get(text)

    def visit_Call(self, node: ast.Call) -> ast.expr:
        """Replace an in-place addition to a tensor without other references by an out-of-place one."""
        self.generic_visit(node)
        function = node.func
        if isinstance(function, ast.Attribute) and function.attr == _IN_PLACE:
            receiver = function.value
            if isinstance(receiver, ast.Call) and chain(receiver.func) == "torch.zeros":
                function.attr = "scatter_add"
        return node

    def visit_ListComp(self, node: ast.ListComp) -> ast.expr:
        """Fill the list in a loop before the statement, so that names of loop variables do not matter."""
        generator = node.generators[0]
        if len(node.generators) > 1 or generator.ifs or generator.is_async:
            return node
        self.count += 1
        name = f"veomni_list_{self.count}"
        empty, loop = ast.parse(f"{name} = ()\nfor each in (): {name} = {name} + (each,)").body
        assert isinstance(loop, ast.For)  # noqa: S101
        loop.target, loop.iter = generator.target, generator.iter
        added = next(inner for inner in walk_ast(loop.body[0]) if isinstance(inner, ast.Tuple))
        added.elts = [node.elt]
        self.before += [empty, loop]
        return ast.copy_location(ast.Name(name, ast.Load()), node)


_NAME = re.compile("load_balancing_loss")


def find(view: ModuleView) -> Iterator[Site]:
    """Every function of a module that may compute the loss, and every call of one."""
    functions = {name: node for name, node in view.functions.items() if _NAME.search(name)}
    yield from view.imported(OP, _NAME)
    calls = Calls(view.document, functions)
    for name, node in functions.items():
        try:
            form, slot, inlined = _known(view, node)
        except Missed as missed:
            yield Site(OP, name, Status.MISSED, reason=missed.reason, lineno=node.lineno)
            continue
        more = {"form": form, "relies_on": (name,), "skips": {name: inlined}}
        sites = []
        for use in calls.sites(name):
            plain = not use.only_if and view.text(use.node) == ast.unparse(use.node)
            why = Reason(use.reason or "its position in the source is unknown", Code.NO_OWNER)
            owner = use.owner if plain else ""
            sites.append(at_use(view, slot, use.where or name, use.node, owner, why, **more))
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


def _known(view: ModuleView, function: FunctionNode) -> tuple[str, SlotSpec, tuple[str, ...]]:
    """The digest of a function that computes the loss, the slot for its calls, and what it calls.

    Raises:
        Missed: it does not compute the loss as any of the spellings.
    """
    if reason := view.why_unclear(function):
        raise Missed(reason)
    own_forms = forms(function, view.scope)
    if isinstance(own_forms, Reason):
        raise Missed(own_forms)
    nearest = None
    for variant, spelling in spellings():
        outcomes = [
            match(pattern, form, dict.fromkeys(pattern.arguments, ARGUMENT))
            for pattern, form in zip(spelling, own_forms, strict=True)
        ]
        differences = [outcome for outcome in outcomes if isinstance(outcome, Difference)]
        if not differences:
            bindings = [outcome.bindings for outcome in outcomes if isinstance(outcome, Match)]
            operands = {str(node.value): name for bound in bindings for name, node in bound.items()}
            parameters = parameters_as(function, operands)
            if parameters is not None and parameter_names(function) == operands.keys():
                slot = formula_slot(OP, variant, parameters)
                inlined = tuple(dict.fromkeys(name for form in own_forms for name in form.inlined))
                return "-".join(digest(form) for form in own_forms[2:]), slot, inlined
        elif nearest is None or differences[0].depth >= nearest.depth:
            nearest = differences[0]
    raise Missed(nearest.why if nearest else Reason("it has other parameters", Code.OTHER_ARGUMENTS))
