"""Find products that may be gated MLPs, by a rough look at their factors."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.tree import initialised, last_name, own_attribute, walk_ast

__all__ = ["ACTIVATIONS", "gated_products", "holds_experts", "is_activation"]

#: Activation functions of MLPs; sigmoid and tanh are missing because they gate attention.
ACTIVATIONS = frozenset(
    "elu gelu hardswish leaky_relu mish quick_gelu relu relu6 selu silu softplus swish".split()
)
_ACTIVATION = re.compile(r"(^|_)act")
_PROJECTION = re.compile(r"Linear|Conv|Dense")
_EXPERTS = re.compile(r"(Experts|NaiveMoe)$")
_RESHAPING = frozenset("chunk clamp float reshape split to type unbind unflatten view".split())


def holds_experts(owner: ast.ClassDef) -> bool:
    """Whether a class holds the weights of several experts, by its name or three-dimensional parameters."""
    if _EXPERTS.search(owner.name):
        return True
    for _, value in initialised(owner):
        for node in walk_ast(value):
            if isinstance(node, ast.Call) and last_name(node.func) == "Parameter" and node.args:
                made = node.args[0]
                if isinstance(made, ast.Call) and len(made.args) >= 3:
                    return True
    return False


def is_activation(callee: ast.expr) -> bool:
    """Whether a callee looks like an activation: ``self.act_fn``, ``F.silu``."""
    name = own_attribute(callee)
    return bool(_ACTIVATION.search(name)) if name else last_name(callee) in ACTIVATIONS


def gated_products(owner: ast.ClassDef, methods: Iterable[FunctionNode]) -> list[ast.expr]:
    """The products of an activated projection and a projection, or of two halves of one projection."""
    flow = _Flow(owner)
    return [product for method in methods for product in flow.of(method)]


class _Flow:
    """Follows projections through the locals of a method, statement by statement."""

    def __init__(self, owner: ast.ClassDef) -> None:
        self.projections = {name for name, value in initialised(owner) if _makes_projection(value)}
        self.locals: dict[str, str] = {}

    def of(self, method: FunctionNode) -> list[ast.expr]:
        """The products of one method."""
        self.locals = {}
        return list(self.products(method.body))

    def products(self, body: list[ast.stmt]) -> Iterator[ast.expr]:
        for statement in body:
            value = getattr(statement, "value", None)
            if isinstance(value, ast.expr):
                for node in walk_ast(value):
                    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
                        if {self.kind(node.left), self.kind(node.right)} == {"activated", "projected"}:
                            yield node
                if isinstance(statement, ast.Assign):
                    self.assign(statement.targets, self.kind(value))
            for name in ("body", "orelse"):
                yield from self.products(getattr(statement, name, []))

    def assign(self, targets: list[ast.expr], kind: str) -> None:
        for target in targets:
            for node in walk_ast(target):
                if isinstance(node, ast.Name):
                    self.locals[node.id] = kind

    def kind(self, node: ast.expr) -> str:
        """``projected``, ``activated`` (an activated projection), or an empty string."""
        if isinstance(node, ast.Name):
            return self.locals.get(node.id, "")
        if isinstance(node, ast.Subscript):
            return self.kind(node.value)
        if isinstance(node, ast.IfExp):
            return self.kind(node.body)
        if isinstance(node, ast.NamedExpr):
            self.assign([node.target], kind := self.kind(node.value))
            return kind
        if isinstance(node, ast.BinOp):
            # A scaled or shifted projection is still a projection; a changed activated one is not a gate.
            return "projected" if "projected" in (self.kind(node.left), self.kind(node.right)) else ""
        return self.of_call(node) if isinstance(node, ast.Call) else ""

    def of_call(self, node: ast.Call) -> str:
        if own_attribute(node.func) in self.projections:
            return "projected"
        if is_activation(node.func):
            operands = (*node.args, *(each.value for each in node.keywords))
            return "activated" if any(map(self.kind, operands)) else ""
        if isinstance(node.func, ast.Attribute) and node.func.attr in _RESHAPING:
            return self.kind(node.func.value) or (self.kind(node.args[0]) if node.args else "")
        return ""


def _makes_projection(value: ast.expr) -> bool:
    calls = (node for node in walk_ast(value) if isinstance(node, ast.Call))
    return any(_PROJECTION.search(last_name(call.func)) for call in calls)
