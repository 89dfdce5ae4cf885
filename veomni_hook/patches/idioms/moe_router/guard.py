"""The guard of a router: it computes weights and indices, and the other values that later code reads."""

from __future__ import annotations

import ast

from veomni_hook.patches.code.edit import Edit
from veomni_hook.patches.code.scope import bound_names, free_name, loaded
from veomni_hook.patches.code.statement_runs import Run, at_hand
from veomni_hook.patches.code.tree import walk_ast
from veomni_hook.patches.graph import Form, reference_form
from veomni_hook.patches.idioms.moe_router.read import OP, REFERENCE, Routing, form_of_locals
from veomni_hook.patches.routes.guards import guard
from veomni_hook.patches.routes.view import Method
from veomni_hook.patches.site import slot_name

__all__ = ["operands", "router_guard"]


def router_guard(method: Method, found: Routing, *, matrix: bool) -> tuple[Edit, ...] | None:
    """The guard for a run; None if the code around it does not allow one.

    Args:
        method: the method that the run belongs to.
        found: the run, and the formula that it computes.
        matrix: whether logits are known to be ``[tokens, experts]``.
    """
    code = operands(method, found)
    if code is None:
        return None
    logits = at_hand(ast.parse(code["router_logits"], mode="eval").body)
    if logits is None:
        return None
    asked, given = logits, ", ".join(code.values())
    if code["router_logits"] == logits:  # else the guard would compute the logits twice
        name = free_name(method.method, "operands")
        asked, given = f"*({name} := ({given}))", f"*{name}"
    answer = ast.parse(f"{found.weights}, {found.indices} = {method.kernel}({given})").body
    if found.rest is not None:
        others = set(loaded([found.rest])) - {found.weights, found.indices}
        if others & bound_names(found.run.statements):
            return None
        answer.append(found.rest)
    slot = slot_name(OP, found.pattern.variant)
    tests = [f"{logits}.ndim == 2"] if found.flat and not matrix else []
    if found.pattern.uncast:
        tests.append(f"{logits}.dtype.itemsize == 4")
    if not _assigned_once_more(method, found):
        return None
    what = f"{OP}/{found.pattern.variant}: weights and indices of each token's experts"
    return guard(
        method.view, found.run, slot, [method.receiver, asked], answer, what, tests=tests, beside=True
    )


def _assigned_once_more(method: Method, found: Routing) -> bool:
    """Whether the guard may recompute the other values of the run that later code reads.

    No statement of the run may change such a value in place, so that the statements that assign it are
    enough. No later statement may act on the same tensor that the weights come from, as a hook does.
    """
    statements = found.run.statements
    read = set(loaded(method.method.body, skip=statements))
    names = sorted(read & bound_names(statements) - {found.weights, found.indices})
    assigning = [each for each in statements if bound_names([each]) & set(names)]
    if not names:
        return True
    nodes = walk_ast(method.method)
    done = [each for each in nodes if isinstance(each, ast.Expr) and each not in statements]
    if not set(names).isdisjoint(loaded(done)):
        return False
    every = form_of_locals(method, found.run, names)
    some = form_of_locals(method, Run(method.method, assigning, 0, len(assigning) - 1), names)
    return isinstance(every, Form) and isinstance(some, Form) and every.result == some.result


def operands(method: Method, found: Routing) -> dict[str, str] | None:
    """The kernel's arguments, as code that is valid before the run."""
    bound = bound_names(found.run.statements)
    fixed = dict(found.pattern.fixed)
    texts = {}
    for name in reference_form(REFERENCE, found.pattern.variant).arguments:
        if name in fixed:
            texts[name] = repr(fixed[name])
            continue
        expression = method.expression(found.bindings[name])
        if expression is None or bound & set(loaded([expression])) - set(_before(expression, found.run)):
            return None
        texts[name] = ast.unparse(expression)
    return texts


def _before(expression: ast.expr, run: Run) -> list[str]:
    """The names in an expression of the run that still have their values from before the run."""
    bound: set[str] = set()
    for statement in run.statements:
        if expression in set(walk_ast(statement)):
            return [name for name in loaded([expression]) if name not in bound]
        bound |= bound_names([statement])
    # An expression from elsewhere is an argument of the run, with the value from before it.
    return loaded([expression])
