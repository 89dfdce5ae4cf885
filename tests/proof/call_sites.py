"""The prover of bound call sites: the call is upstream's own, and only its callee is another."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Mapping
from typing import Any

from tests.patches.idioms.applied import spliced
from tests.proof.compare import Differs
from tests.proof.provers import Proof, Unreached
from tests.proof.texts import definition, patched, upstream_of, with_copies_in_place


def prove_call_site(site: Any, module: Any, variants: Mapping[str, str]) -> Proof:
    """A bound call is upstream's call of upstream's function, with ``slot.at(owner, ...)`` around its callee.

    ``variants`` are the variants for which functions of the module are proved, by their names.
    """
    upstream = upstream_of(module)
    edited = with_copies_in_place(ast.parse(spliced(upstream, [site])))
    bound = _Calls({slot.name for slot in site.slots})
    bound.visit(definition(edited, site.target))
    if not bound.found:
        raise Unreached("no call is bound")
    if ast.dump(_Unbound(bound.slots).visit(edited)) != ast.dump(ast.parse(upstream)):
        raise Differs("what the site edits is not upstream's around its bound calls")
    # Edits of all sites together: the calls are still there.
    all_ = _Calls(bound.slots)
    all_.visit(patched(module, site.target))
    if bound.found - all_.found:
        raise Unreached("the patched module lacks a bound call")
    for callee in bound.callees:
        function = getattr(module, callee, None)
        if getattr(function, "__module__", None) != module.__name__:
            raise Unreached(f"{callee} is of another module, where a slot does not ask kernels")
        if site.variant not in variants.get(callee, "").split("|"):
            raise Unreached(f"{callee} is not proved to be {site.variant}")
    return Proof(gradients=0)


def _callee(node: ast.Call, slots: set[str]) -> ast.expr | None:
    """What a call binds to one of the slots, or None."""
    function = node.func
    if isinstance(function, ast.Attribute) and function.attr == "at" and isinstance(function.value, ast.Name):
        if function.value.id in slots and len(node.args) == 2 and not node.keywords:
            return node.args[1]
    return None


class _Calls(ast.NodeVisitor):
    """Counts bound calls, with all their arguments."""

    def __init__(self, slots: set[str]) -> None:
        self.slots = slots
        self.found: Counter[str] = Counter()
        self.callees: set[str] = set()

    def visit_Call(self, node: ast.Call) -> None:
        bound = [node.func] if isinstance(node.func, ast.Call) else []
        if isinstance(node.func, ast.Attribute) and node.func.attr == "get_interface":
            # Bound as the default that the look-up returns, instead of at the call.
            bound = [each for each in node.args if isinstance(each, ast.Call)]
        for each in bound:
            if (callee := _callee(each, self.slots)) is not None:
                self.found[ast.dump(node)] += 1
                self.callees.add(ast.unparse(callee))
        self.generic_visit(node)


class _Unbound(ast.NodeTransformer):
    def __init__(self, slots: set[str]) -> None:
        self.slots = slots

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        return _callee(node, self.slots) or node
