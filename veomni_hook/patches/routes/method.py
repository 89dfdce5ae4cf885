"""A method that is searched for a run of statements that computes a formula."""

from __future__ import annotations

import ast

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.statement_runs import Run
from veomni_hook.patches.code.walk import walk_ast
from veomni_hook.patches.graph import Form, Node, Unknown, canonical, digest, has_source, source
from veomni_hook.patches.routes.insertion import free_name
from veomni_hook.patches.routes.view import ModuleView

__all__ = ["Method"]


class Method:
    """What searches need to know about a method."""

    def __init__(self, view: ModuleView, owner: ast.ClassDef, method: FunctionNode) -> None:
        self.view = view
        self.owner = owner
        self.method = method
        self.receiver = method.args.args[0].arg
        self.target = f"{owner.name}.{method.name}"
        self.kernel = free_name(method, "kernel")

    def form_of(self, run: Run) -> Form | Unknown:
        """What a run computes, as a function of the locals that it reads."""
        made = run.as_function()
        return canonical(made, self.view.scope, self.owner, body=made.body)

    def digest(self) -> str:
        """The digest of what the whole method computes; empty if it cannot be analysed."""
        form = canonical(self.method, self.view.scope, self.owner)
        return digest(form) if isinstance(form, Form) else ""

    def expression(self, node: Node) -> ast.expr | None:
        """Upstream's code for the node that a hole of a formula matches; None if the method has none."""
        if node.op == "cast" and node.origin is None:
            node = node.args[0]  # a promotion, which the formula repeats
        if node.op == "global":
            return self._global(node)
        if has_source(node):
            return ast.parse(source(node, self.receiver), mode="eval").body
        # Code of a helper uses the helper's own names.
        return node.origin if node.origin in set(walk_ast(self.method)) else None

    def _global(self, node: Node) -> ast.expr | None:
        if node.origin is None:
            # `logits.sigmoid()` has no function object that could be passed on.
            known = str(node.value).startswith("torch.") and self.view.scope.resolve("torch") == "torch"
            return ast.parse(str(node.value), mode="eval").body if known else None
        said = self.view.scope.dotted(node.origin) not in ("", f":{node.value}")
        return ast.parse(source(node), mode="eval").body if said else None
