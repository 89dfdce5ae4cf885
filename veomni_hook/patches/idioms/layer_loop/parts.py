"""Evaluate parts of tensors that slices name, and code that writes to a part."""

from __future__ import annotations

import ast

from veomni_hook.patches.code.tree import last_name
from veomni_hook.patches.idioms.layer_loop.calls import Calls
from veomni_hook.patches.idioms.layer_loop.expressions import Environment
from veomni_hook.patches.idioms.layer_loop.shapes import broadcast, fresh
from veomni_hook.patches.idioms.layer_loop.values import (
    PLAIN,
    Dim,
    Plain,
    Size,
    Tensor,
    Value,
    is_positional,
)
from veomni_hook.patches.site import Missed

__all__ = ["Parts"]

#: The value of ``slice(...)``.
_SLICE = Plain(slice)


class Parts(Calls):
    """Evaluates parts of tensors.

    Args:
        view: the file.
    """

    def bind(self, target: ast.expr, value: Value, scope: Environment) -> None:
        """Assign a value to a target.

        Raises:
            Missed: the target is no name and no part of a tensor, or a value cannot be unpacked.
        """
        held = self.evaluate(target.value, scope) if isinstance(target, ast.Subscript) else None
        if not isinstance(target, ast.Subscript) or not isinstance(held, Tensor):
            super().bind(target, value, scope)
            return
        part, value = self._part(held, target, scope), self.tensor_like(value, target)
        if not isinstance(part, Tensor) or not isinstance(value, Tensor | Plain):
            raise Missed("it writes to a part of a value", target)
        # What is written has the positions of the part, or is the same for all of them.
        if _positions(self.proven(lambda: broadcast(part, value), target)) != _positions(part):
            raise Missed("it writes positions to a part without positions", target)

    def _builtin(self, name: str, given: list[Value], node: ast.Call) -> Value:
        first = given[0] if given else PLAIN
        if name == "isinstance" and isinstance(first, Tensor) and last_name(node.args[1]) == "tuple":
            return Plain(False)
        if name == "slice":
            if any(isinstance(self.tensor_like(each, node), Tensor) for each in given):
                raise Missed("slice of values of some positions", node)
            return _SLICE
        return super()._builtin(name, given, node)

    def _taken(self, dim: Dim, index: ast.expr, node: ast.AST, scope: Environment) -> list[Dim]:
        if isinstance(index, ast.Slice):
            lower = index.lower if index.upper is index.step is None else None
            if isinstance(lower, ast.UnaryOp) and isinstance(lower.op, ast.USub):
                # The last ones, as many as there are.
                if self.evaluate(lower.operand, scope) == Size(dim):
                    return [dim]
        elif self.evaluate(index, scope) == _SLICE:
            if is_positional(dim):
                raise Missed("it takes a part of the positions", node)
            return [fresh()]
        return super()._taken(dim, index, node, scope)


def _positions(value: Value) -> list[bool]:
    return [is_positional(dim) for dim in value.dims] if isinstance(value, Tensor) else []
