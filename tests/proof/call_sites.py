"""The prover of bound call sites: the call is upstream's own, and only its callee is another."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

from tests.proof.build import Unbuildable
from tests.proof.compare import Differs

__all__ = ["definition", "prove_call_site"]


def prove_call_site(site: Any, module: Any) -> str:
    """A bound call is upstream's call of upstream's function, with ``slot.at(owner, ...)`` around its callee."""
    loader: Any = module.__spec__.loader
    patched, upstream = (
        definition(ast.parse(Path(path).read_text(encoding="utf-8")), site.target)
        for path in (module.__file__, loader.upstream)
    )
    slots = {slot.name for slot in site.slots}
    bound = _Unbound(slots)
    unbound = bound.visit(patched)
    if not bound.seen:
        raise Unbuildable("no call is bound")
    if ast.dump(unbound) != ast.dump(upstream) and not _only_inserted(unbound, upstream):
        raise Differs("the patched definition is not upstream's around its bound calls")
    return "equal"


class _Unbound(ast.NodeTransformer):
    def __init__(self, slots: set[str]) -> None:
        self.slots, self.seen = slots, 0

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        function = node.func
        at = isinstance(function, ast.Attribute) and function.attr == "at"
        if at and isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
            if function.value.id in self.slots and len(node.args) == 2 and not node.keywords:
                self.seen += 1
                return node.args[1]
        return node


def _only_inserted(patched: ast.AST, upstream: ast.AST) -> bool:
    """Whether every statement of upstream's is there, in order; guards of other ops stand between them."""
    wanted = [ast.dump(s) for s in getattr(upstream, "body", [])]
    found = iter([ast.dump(s) for s in getattr(patched, "body", [])])
    return all(statement in found for statement in wanted)


def definition(tree: ast.Module, target: str) -> ast.AST:
    """The definition that a target names."""
    body: list[ast.stmt] = tree.body
    found: ast.stmt | None = None
    for part in target.split("."):
        kinds = (ast.FunctionDef, ast.ClassDef)
        found = next(s for s in reversed(body) if isinstance(s, kinds) and s.name == part)
        body = found.body
    assert found is not None
    return found
