"""Find products that may be gated MLPs, by a rough look at their factors."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.scope import read_names
from veomni_hook.patches.code.tree import calls_in, initialised, last_name, own_attribute, walk_ast

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
    calls = (call for _, value in initialised(owner) for call in calls_in(value))
    made = (call.args[0] for call in calls if last_name(call.func) == "Parameter" and call.args)
    return _EXPERTS.search(owner.name) is not None or any(len(getattr(one, "args", ())) > 2 for one in made)


def is_activation(callee: ast.expr) -> bool:
    """Whether a callee looks like an activation: ``self.act_fn``, ``F.silu``."""
    name = own_attribute(callee)
    return bool(_ACTIVATION.search(name)) if name else last_name(callee) in ACTIVATIONS


def gated_products(owner: ast.ClassDef, methods: Iterable[FunctionNode]) -> list[ast.expr]:
    """The products of an activated projection and a projection, or of two halves of one projection."""
    projections = {
        name
        for name, value in initialised(owner)
        if any(_PROJECTION.search(last_name(call.func)) for call in calls_in(value))
    }
    return [product for method in methods for product in _Flow(projections).products(method.body)]


class _Flow:
    """Follows projections through the locals of a method, statement by statement."""

    def __init__(self, projections: set[str]) -> None:
        self.projections = projections
        self.locals: dict[str, str] = {}

    def products(self, body: list[ast.stmt]) -> Iterator[ast.expr]:
        for statement in body:
            value = getattr(statement, "value", None)
            if isinstance(value, ast.expr):
                for node in walk_ast(value):
                    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
                        if {self.kind(node.left), self.kind(node.right)} == {"activated", "projected"}:
                            yield node
                for target in statement.targets if isinstance(statement, ast.Assign) else ():
                    self.locals.update(dict.fromkeys(read_names(target), self.kind(value)))
            for name in ("body", "orelse"):
                yield from self.products(getattr(statement, name, []))

    def kind(self, node: ast.expr) -> str:
        """``projected``, ``activated`` (an activated projection), or an empty string."""
        if isinstance(node, ast.Name):
            return self.locals.get(node.id, "")
        if isinstance(node, ast.Call):
            return self.of_call(node)
        if isinstance(node, ast.BinOp):
            # A scaled or shifted projection is still a projection; a changed activated one is not a gate.
            return "projected" if "projected" in (self.kind(node.left), self.kind(node.right)) else ""
        if isinstance(node, ast.NamedExpr):
            self.locals[node.target.id] = self.kind(node.value)
        if isinstance(node, ast.NamedExpr | ast.Subscript):
            return self.kind(node.value)
        return self.kind(node.body) if isinstance(node, ast.IfExp) else ""

    def of_call(self, node: ast.Call) -> str:
        if own_attribute(node.func) in self.projections:
            return "projected"
        operands = [*node.args, *(keyword.value for keyword in node.keywords)]
        if is_activation(node.func):
            return "activated" if any(map(self.kind, operands)) else ""
        if isinstance(node.func, ast.Attribute) and node.func.attr in _RESHAPING:
            return next(filter(None, map(self.kind, [node.func.value, *node.args[:1]])), "")
        return ""
