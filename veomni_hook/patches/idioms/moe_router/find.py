"""Routers of experts: from the logits to the weights and indices of each token's experts.

The guard is inserted where the logits are known. The projection before it, and casts, scaling and the order
of the results after it, stay upstream's.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from veomni_hook.patches.code.edit import Edit
from veomni_hook.patches.code.statement_runs import Run, simple_target
from veomni_hook.patches.code.tree import swapped, walk_ast
from veomni_hook.patches.graph import Difference, Form, Node, digest, walk
from veomni_hook.patches.idioms.moe_router.guard import operands, router_guard
from veomni_hook.patches.idioms.moe_router.read import (
    OP,
    Pattern,
    Routing,
    flat,
    form_of_locals,
    is_by_number,
    is_matrix,
    patterns,
)
from veomni_hook.patches.routes.view import Method, ModuleView
from veomni_hook.patches.site import Code, Reason, Site, Status

__all__ = ["CANDIDATES", "OP", "find"]

CANDIDATES = (
    "Every forward of a class whose name contains Router, Gate or Gating, and every method whose name "
    "contains route, that calls topk, itself or in a method of its class that it calls."
)
_CLASS = re.compile(r"Router|Gate|Gating")


def find(view: ModuleView) -> Iterator[Site]:
    """Every candidate of a module."""
    for _, owner, method in view.every_method():
        named = method.name == "forward" and _CLASS.search(owner.name) is not None
        if named or "route" in method.name:
            helpers = [each for name, each in view.helpers(owner, method).items() if "route" not in name]
            if any(re.search(r"\btopk\(", view.text(each)) for each in (method, *helpers)):
                yield _Search(view, owner, method).site()


class _Search(Method):
    """Looks for one of the formulas in a method, statement by statement."""

    nearest: Difference | None = None

    def site(self) -> Site:
        """The method as a site."""
        body = self.method.body
        for last in range(len(body) - 1, -1, -1):
            # If the formula is not in all code up to here, it is not in a part of that code.
            known = next(self.at(Run(self.method, body, 0, last), whole=True), None)
            if known is None:
                continue
            matrix = is_matrix(known.bindings["router_logits"])
            for first in range(_first_part(known), -1, -1):
                for found in self.at(Run(self.method, body, first, last)):
                    if found.pattern.uncast > known.pattern.uncast:
                        continue
                    if (edits := router_guard(self, found, matrix=matrix)) is not None:
                        return self.routed(found, edits)
        unknown = Reason("no two locals hold weights and indices of a top k", Code.OTHER_FORM)
        reason = self.nearest.why if self.nearest is not None else unknown
        return Site(OP, self.target, Status.MISSED, reason=reason, lineno=self.method.lineno)

    def at(self, run: Run, *, whole: bool = False) -> Iterator[Routing]:
        """The formulas that a run computes in two of its locals.

        Args:
            whole: the run begins at the method's first statement, so the choice of its start does not matter.
        """
        nodes = [node for each in run.statements for node in walk_ast(each)]
        names = list(dict.fromkeys(name for each in run.statements for name in _assigned(each)))
        if any(isinstance(node, ast.Return) for node in nodes) or not any(map(_is_topk, nodes)):
            return
        form = form_of_locals(self, run, names)
        # A kernel cannot replace code that has side effects or may raise before them.
        if not isinstance(form, Form) or form.result.op != "tuple" or (form.effects and not whole):
            return
        held = [
            (name, flat(node, prove=not whole)) for name, node in zip(names, form.result.args, strict=True)
        ]
        calls = {node for _, value in held for node in walk(value) if node.op == "call"}
        for index_name, indices in held:
            for weight_name, weights in held if indices.op == "item" else ():
                for inner in self.made_of(run, weight_name, weights):
                    pair = Node("tuple", (inner, indices))
                    if not whole and not calls <= set(walk(pair)):
                        continue
                    for pattern, bindings in self.matches(pair, whole=whole):
                        rest = _rest(run, weight_name, inner) if inner is not weights else None
                        raw = (form.result.args[names.index(name)] for name in (weight_name, index_name))
                        by_number = any(map(is_by_number, walk(*raw)))
                        known = Routing(run, pattern, weight_name, index_name, bindings, pair, form.inlined)
                        yield replace(known, rest=rest, flat=by_number)

    def matches(self, pair: Node, *, whole: bool) -> Iterator[tuple[Pattern, Mapping[str, Node]]]:
        """The formulas that match weights and indices."""
        for pattern in patterns():
            if pair.args[0].op != pattern.node.args[0].op:
                continue
            made = pattern.match(pair, whole=whole)
            if not isinstance(made, Difference):
                yield pattern, made.bindings
            elif not pattern.uncast and (self.nearest is None or made.depth > self.nearest.depth):
                self.nearest = made

    def made_of(self, run: Run, name: str, node: Node) -> Iterator[Node]:
        """A value, and the parts that the last statement casts or scales if it assigns ``name``."""
        yield node
        inside = set(walk_ast(run.statements[-1])) if simple_target(run.statements[-1]) == name else set()
        yield from (
            inner for inner in walk(*node.args) if inner.origin is not None and inner.origin in inside
        )

    def routed(self, found: Routing, edits: tuple[Edit, ...]) -> Site:
        return Site.asking(
            OP,
            self.target,
            found.pattern.variant,
            self.method,
            edits,
            form=self.digest() or digest(Node("tuple", tuple(found.bindings.values()))),
            captures=operands(self, found) or {},
            skips={self.target: found.inlined} if found.inlined else {},
        )


def _rest(run: Run, name: str, inner: Node) -> ast.stmt | None:
    """The last statement of a run, with ``inner`` in its value replaced by ``name``."""
    value = getattr(run.statements[-1], "value", None)
    if not isinstance(value, ast.expr) or inner.origin is None:
        return None
    new = swapped(value, {id(inner.origin): (ast.Name(name, ast.Load()),)})
    return ast.Assign([ast.Name(name, ast.Store())], new)


def _first_part(found: Routing) -> int:
    """The index of the statement that computes the first part of the formula."""
    inputs = set(walk(*found.bindings.values()))
    parts = {node.origin for node in walk(found.pair) if node not in inputs}
    statements = found.run.statements
    last = len(statements) - 1
    return next((n for n in range(last) if not parts.isdisjoint(walk_ast(statements[n]))), last)


def _assigned(statement: ast.stmt) -> list[str]:
    """The names that a statement assigns unconditionally."""
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    if isinstance(statement, ast.AnnAssign) and statement.value is not None:
        targets = [statement.target]
    names = [node.id for each in targets for node in walk_ast(each) if isinstance(node, ast.Name)]
    return [name for name in names if name != "_"]


def _is_topk(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "topk"
