"""The prover of bound calls of modules: with what they call put back, the patched text is upstream's."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

from tests.proof.call_sites import definition
from tests.proof.compare import Differs
from tests.proof.provers import Proof, Unreached


def prove_module_calls(site: Any, module: Any) -> Proof:
    """``slot.call(self, module, x)`` is upstream's ``module(x)``, in the site's edits and the patched module.

    What a kernel computes instead of the call, tests compare with the call of the module.
    """
    loader: Any = module.__spec__.loader
    upstream = Path(loader.upstream).read_text(encoding="utf-8")
    edited = upstream
    for edit in sorted(site.edits, key=lambda edit: edit.start, reverse=True):
        edited = edited[: edit.start] + edit.text + edited[edit.end :]
    unbound = _Unbound({slot.name for slot in site.slots})
    if ast.dump(unbound.visit(ast.parse(edited))) != ast.dump(ast.parse(upstream)):
        raise Differs("what the site edits is not upstream's around its bound calls")
    if unbound.count != len(site.edits):
        raise Unreached(f"{unbound.count} of {len(site.edits)} calls are bound")
    patched = _Unbound(unbound.slots)
    patched.visit(definition(ast.parse(Path(module.__file__).read_text(encoding="utf-8")), site.target))
    if patched.count < unbound.count:
        raise Unreached("the patched module lacks a bound call")
    return Proof(gradients=0)


class _Unbound(ast.NodeTransformer):
    """Puts the calls of modules back, and counts them."""

    def __init__(self, slots: set[str]) -> None:
        self.slots = slots
        self.count = 0

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        function = node.func
        if not (isinstance(function, ast.Attribute) and getattr(function.value, "id", "") in self.slots):
            return node
        if function.attr != "call" or getattr(node.args[0], "id", "") != "self":
            return node
        self.count += 1
        return ast.Call(node.args[1], node.args[2:], [])
