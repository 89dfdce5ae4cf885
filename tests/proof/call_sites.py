"""The prover of bound call sites: the call is upstream's own, and only its callee is another."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.proof.compare import Differs
from tests.proof.provers import Proof, Unreached
from veomni_hook.patches.code.document import has_docstring
from veomni_hook.patches.routes.compose import copy_name


def prove_call_site(site: Any, module: Any, variants: Mapping[str, str]) -> Proof:
    """A bound call is upstream's call of upstream's function, with ``slot.at(owner, ...)`` around its callee.

    ``variants`` are the variants for which functions of the module are proved, by their names.
    """
    loader: Any = module.__spec__.loader
    upstream = Path(loader.upstream).read_text(encoding="utf-8")
    edited = ast.parse(_spliced(upstream, site.edits))
    bound = _Calls({slot.name for slot in site.slots})
    bound.visit(definition(edited, site.target))
    if not bound.found:
        raise Unreached("no call is bound")
    if ast.dump(_Unbound(bound.slots).visit(edited)) != ast.dump(ast.parse(upstream)):
        raise Differs("what the site edits is not upstream's around its bound calls")
    # Edits of all sites together: the calls are still there.
    patched = _Calls(bound.slots)
    patched.visit(definition(ast.parse(Path(module.__file__).read_text(encoding="utf-8")), site.target))
    if bound.found - patched.found:
        raise Unreached("the patched module lacks a bound call")
    for callee in bound.callees:
        function = getattr(module, callee, None)
        if getattr(function, "__module__", None) != module.__name__:
            raise Unreached(f"{callee} is of another module, where a slot does not ask kernels")
        if site.variant not in variants.get(callee, "").split("|"):
            raise Unreached(f"{callee} is not proved to be {site.variant}")
    return Proof(gradients=0)


def _spliced(source: str, edits: Any) -> str:
    for edit in sorted(edits, key=lambda edit: edit.start, reverse=True):
        source = source[: edit.start] + edit.text + source[edit.end :]
    return source


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


def with_copies_in_place(tree: ast.Module) -> ast.Module:
    """Patched code with the copies of methods, where kernels replace several statements, for the methods."""
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    for owner in tree.body:
        for method in owner.body if isinstance(owner, ast.ClassDef) else ():
            name = copy_name(f"{owner.name}.{getattr(method, 'name', '')}")
            if isinstance(method, ast.FunctionDef) and name in functions:
                docstring = method.body[: int(has_docstring(method))]
                method.body = [*docstring, *functions[name].body]
                tree.body.remove(functions[name])
    return tree


def definition(tree: ast.Module, target: str) -> ast.AST:
    """The definition that a target names; for a method with a copy, with the code of the copy."""
    tree = with_copies_in_place(tree)
    body: list[ast.stmt] = tree.body
    found: ast.stmt | None = None
    for part in target.split("."):
        kinds = (ast.FunctionDef, ast.ClassDef)
        found = next(s for s in reversed(body) if isinstance(s, kinds) and s.name == part)
        body = found.body
    assert found is not None
    return found
