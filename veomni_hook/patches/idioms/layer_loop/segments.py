"""Evaluate layers of towers: attention stays within segments, and everything else is for each row alone."""

from __future__ import annotations

import ast

from veomni_hook.patches.code.scope import own_names
from veomni_hook.patches.code.template import Found
from veomni_hook.patches.code.tree import last_name, own_attribute, walk_ast
from veomni_hook.patches.idioms.layer_loop.calls import CallArguments
from veomni_hook.patches.idioms.layer_loop.expressions import Environment
from veomni_hook.patches.idioms.layer_loop.interpreter import Interpreter
from veomni_hook.patches.idioms.layer_loop.shapes import fresh
from veomni_hook.patches.idioms.layer_loop.values import (
    POSITIONS,
    Maybe,
    Method,
    Operation,
    Tensor,
    Unknown,
    Value,
    Whole,
    is_positional,
)
from veomni_hook.patches.idioms.varlen_attention.find import read
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Missed

__all__ = ["NotARow", "Segmented", "given_name", "given_value"]

_OF_TOWER = " of the tower"
_OR = " or "
#: The arguments of fused attention that hold boundaries.
_ENDS = ("cu_seq_lens_q", "cu_seq_lens_k")


class NotARow(Exception):
    """Layers compute with something that is not known to have a row for each row of the hidden states.

    It is not `Missed`, to which the methods around it would add their names.

    Args:
        name: what the tower's forward calls it; empty if it is nothing of the forward.
        parts: into how many values they unpack it; 0 if they do not.
        node: the code.
    """

    def __init__(self, name: str, parts: int, node: ast.AST) -> None:
        line = getattr(node, "lineno", 0)
        super().__init__(f"it computes with {name}, which holds all rows (line {line})")
        self.name, self.parts = name, parts


def given_value(name: str) -> Whole:
    """The value of what a tower's forward calls ``name``, for all rows."""
    return Whole(name + _OF_TOWER)


def given_name(value: Value) -> str:
    """The name in the tower's forward; empty for a value that is not, or may be another one."""
    value = value.value if isinstance(value, Maybe) else value
    if isinstance(value, Whole) and value.name.endswith(_OF_TOWER) and _OR not in value.name:
        return value.name.removesuffix(_OF_TOWER)
    return ""


class Segmented(Interpreter):
    """Evaluates the layers of a tower.

    Args:
        view: the file.
    """

    def __init__(self, view: ModuleView) -> None:
        super().__init__(view)
        #: What the tower's forward calls the boundaries of segments.
        self.boundaries: set[str] = set()
        self._segments: list[Found] = []

    def invoke(self, method: Method, arguments: CallArguments, node: ast.AST) -> Value:
        """The result of a function or method of the file; see `Calls.invoke`."""
        try:
            found = read(method.node)
        except Missed as error:
            raise Missed(f"{method.node.name}: {error}", node) from None
        if found is not None:
            self._segments.append(found)
        return super().invoke(method, arguments, node)

    def _branch(
        self,
        node: ast.If,
        scope: Environment,
        returned: list[Value],
        left: list[dict[str, Value]],
    ) -> bool:
        for found in self._segments:
            for block, fused in ((node.orelse, node.body), (node.body, node.orelse)):
                if found.block is block:
                    self._attended(found, fused, scope)
                    return True
        return super()._branch(node, scope, returned, left)

    def _attended(self, found: Found, fused: list[ast.stmt], scope: Environment) -> None:
        """Attention within segments, by one fused call or by segment: both get the same boundaries."""
        at = found.first
        if found.index:
            raise Missed("attention by segment begins with other statements", at)
        for name in _tensors(found):
            value = scope.get(name)
            dims = value.dims if isinstance(value, Tensor) else ()
            if len(dims) != 4 or dims[2] != (POSITIONS,) or any(map(is_positional, (dims[1], dims[3]))):
                raise Missed(f"the {name} of its attention is not [1, heads, rows, width]", at)
        self.boundaries |= self._boundaries(scope.get(found["CU_SEQLENS"]), at)
        _check_fused(found, fused, at)
        for name in own_names([*found.block[found.index :], *fused]):
            scope[name] = Unknown(f"{name}, which attention computes")
        scope[found["OUTPUT"]] = Tensor(((), (POSITIONS,), fresh(), fresh()))

    def _boundaries(self, value: Value | None, node: ast.AST) -> set[str]:
        """The names of the boundaries in the tower's forward: settings may choose between several."""
        names = value.name.split(_OR) if isinstance(value, Whole) else []
        known = [given_name(Whole(name)) for name in names]
        if not known or not all(known):
            raise Missed("the boundaries of its attention are not those of the tower", node)
        return set(known)

    def _attend(self, arguments: CallArguments, node: ast.Call) -> Value:
        raise Missed("its attention is not split at boundaries", node)

    def tensor_like(self, value: Value, node: ast.AST) -> Value:
        """A value that code computes with; see `Expressions.tensor_like`."""
        if name := given_name(value):
            raise NotARow(name, 0, node)
        return super().tensor_like(value, node)

    def _unpacked(self, target: ast.Tuple | ast.List, value: Value) -> list[Value]:
        if name := given_name(value):
            raise NotARow(name, len(target.elts), target)
        return super()._unpacked(target, value)

    def _operation(self, function: Operation, arguments: CallArguments, node: ast.Call) -> Value:
        if name := given_name(function.value):
            raise NotARow(name, 0, node)
        return super()._operation(function, arguments, node)


def _check_fused(found: Found, fused: list[ast.stmt], at: ast.AST) -> None:
    """Raise unless the other branch is one call of attention with the same tensors and boundaries."""
    calls = [
        node
        for statement in fused
        for node in walk_ast(statement)
        if isinstance(node, ast.Call) and {each.arg for each in node.keywords} & {*_ENDS}
    ]
    results = [each for each in fused if isinstance(each, ast.Assign) and each.value in calls]
    if len(calls) != 1 or len(results) != 1:
        raise Missed("the other way to its attention has no boundaries", at)
    (call,), target = calls, results[0].targets[0]
    first = target.elts[0] if isinstance(target, ast.Tuple) else target
    named = {each.arg: ast.unparse(each.value) for each in call.keywords if each.arg is not None}
    given = [ast.unparse(each) for each in call.args]
    if (
        [named.get(name) for name in _ENDS] != [found["CU_SEQLENS"]] * 2
        or given[1:] != _tensors(found)
        or last_name(first) != found["OUTPUT"]
        or any(own_attribute(node) for each in fused if each is not results[0] for node in _called(each))
    ):
        raise Missed("the other way to its attention has other operands", at)


def _tensors(found: Found) -> list[str]:
    return [found[name] for name in ("QUERY", "KEY", "VALUE")]


def _called(statement: ast.stmt) -> list[ast.expr]:
    return [node.func for node in walk_ast(statement) if isinstance(node, ast.Call)]
