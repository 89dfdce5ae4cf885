"""Run layer code statement by statement, on what is known of the positions."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence

from veomni_hook.patches.idioms.layer_loop.choices import chosen
from veomni_hook.patches.idioms.layer_loop.expressions import Environment
from veomni_hook.patches.idioms.layer_loop.joining import joined
from veomni_hook.patches.idioms.layer_loop.linear_attention import LinearAttention
from veomni_hook.patches.idioms.layer_loop.values import (
    NOTHING,
    PLAIN,
    Items,
    Many,
    Maybe,
    Own,
    Plain,
    Tensor,
    Unknown,
    Value,
    Whole,
    is_positional,
)
from veomni_hook.patches.site import Missed

__all__ = ["Interpreter"]

_ROUNDS = 4
_SHORT = 8


class Interpreter(LinearAttention):
    """Evaluates the code of one file.

    Args:
        view: the file.
    """

    def body(self, statements: Iterable[ast.stmt], scope: Environment) -> Value:
        """Run a function's body; the value is what it returns.

        Raises:
            Missed: it moves or mixes positions, or cannot be followed.
        """
        returned: list[Value] = []
        if self.run(list(statements), scope, returned, []):
            returned.append(NOTHING)
        result = returned[0] if returned else NOTHING
        for value in returned[1:]:
            result = joined(result, value)
        return result

    def run(
        self,
        statements: Sequence[ast.stmt],
        scope: Environment,
        returned: list[Value],
        left: list[dict[str, Value]],
    ) -> bool:
        """Run statements; whether control reaches their end.

        Args:
            statements: the block.
            scope: the local names; changed.
            returned: gets what it returns.
            left: gets the local names where a loop's round ends early.

        Raises:
            Missed: it moves or mixes positions, or cannot be followed.
        """
        for statement in statements:
            if isinstance(statement, ast.Return):
                returned.append(self.evaluate(statement.value, scope) if statement.value else NOTHING)
                return False
            if isinstance(statement, ast.Raise):
                return False
            if isinstance(statement, ast.Continue | ast.Break):
                left.append(dict(scope))
                return False
            if isinstance(statement, ast.If):
                if not self._branch(statement, scope, returned, left):
                    return False
            elif isinstance(statement, ast.With):
                if not self.run(statement.body, scope, returned, left):
                    return False
            elif isinstance(statement, ast.For):
                self._loop(statement, scope, returned)
            else:
                self._simple(statement, scope)
        return True

    def _simple(self, statement: ast.stmt, scope: Environment) -> None:
        if isinstance(statement, ast.Assign):
            value = self.evaluate(statement.value, scope)
            for target in statement.targets:
                self.bind(target, value, scope)
        elif isinstance(statement, ast.AnnAssign):
            if statement.value is not None:
                self.bind(statement.target, self.evaluate(statement.value, scope), scope)
        elif isinstance(statement, ast.AugAssign):
            held = self.evaluate(_as_read(statement.target), scope)
            value = self.computed(held, self.evaluate(statement.value, scope), statement.op, statement)
            self.bind(statement.target, value, scope)
        elif isinstance(statement, ast.Expr):
            self.evaluate(statement.value, scope)
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            scope.update({alias.asname or alias.name: PLAIN for alias in statement.names})
        elif isinstance(statement, ast.FunctionDef):
            scope[statement.name] = Unknown(f"{statement.name}, a function inside a function")
        elif not isinstance(statement, ast.Pass | ast.Assert | ast.Delete):
            raise Missed(f"{type(statement).__name__} is not followed", statement)

    def _branch(
        self,
        node: ast.If,
        scope: Environment,
        returned: list[Value],
        left: list[dict[str, Value]],
    ) -> bool:
        if not node.orelse and all(isinstance(each, ast.Raise) for each in node.body):
            return True  # a check
        known = self.truth(node.test, scope)
        ends = []
        for outcome, block in ((True, node.body), (False, node.orelse)):
            if known in (None, outcome):
                inner = dict(scope)
                _assume(node.test, outcome, inner)
                self._choose(node.test, outcome, inner)
                if self.run(block, inner, returned, left):
                    ends.append(inner)
        if not ends:
            return False
        _join(scope, ends)
        return True

    def _attribute(self, node: ast.Attribute, scope: Environment) -> Value:
        if isinstance(node.value, ast.Name) and (known := scope.get(f"{node.value.id}.{node.attr}")):
            return known  # in this branch
        return super()._attribute(node, scope)

    def _choose(self, test: ast.expr, outcome: bool, scope: Environment) -> None:  # noqa: FBT001 - of the test
        """What a branch knows of modules that a setting chose."""
        own = scope.get("self")
        if isinstance(own, Own):
            for name, value in chosen(self.attributes, own.owner, test, outcome=outcome):
                scope[f"self.{name}"] = value

    def _loop(self, node: ast.For, scope: Environment, returned: list[Value]) -> None:
        values = self.evaluate(node.iter, scope)
        values = values.value if isinstance(values, Maybe) else values
        if isinstance(values, Tensor):
            raise Missed("a loop over positions", node)
        if isinstance(values, Items) and len(values.values) <= _SHORT:
            for value in values.values:
                self.round(node, value, scope, returned)
            return
        value = values.value if isinstance(values, Many) else values if isinstance(values, Whole) else PLAIN
        for _ in range(_ROUNDS):
            before = dict(scope)
            self.round(node, value, scope, returned)
            _join(scope, [before, dict(scope)])
            if _alike(before, scope):
                return
        raise Missed("a loop whose values change from round to round", node)

    def round(self, node: ast.For, value: Value, scope: Environment, returned: list[Value]) -> None:
        """Run one round of a loop.

        Raises:
            Missed: it moves or mixes positions, or cannot be followed.
        """
        if node.orelse:
            raise Missed("a loop with an else", node)
        ends: list[dict[str, Value]] = []
        self.bind(node.target, value, scope)
        if self.run(node.body, scope, returned, ends):
            ends.append(dict(scope))
        if ends:
            _join(scope, ends)


def _as_read(target: ast.expr) -> ast.expr:
    if isinstance(target, ast.Name):
        return ast.copy_location(ast.Name(target.id, ast.Load()), target)
    return target


def _assume(test: ast.expr, outcome: bool, scope: Environment) -> None:  # noqa: FBT001 - of the test
    """What a branch knows of names that may be None."""
    if isinstance(test, ast.BoolOp):
        if isinstance(test.op, ast.And) is outcome:
            for each in test.values:
                _assume(each, outcome, scope)
        return
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        _assume(test.operand, not outcome, scope)
    elif isinstance(test, ast.Compare) and isinstance(test.left, ast.Name) and len(test.ops) == 1:
        value = scope.get(test.left.id)
        other = test.comparators[0]
        if isinstance(value, Maybe) and isinstance(other, ast.Constant) and other.value is None:
            if isinstance(test.ops[0], ast.Is | ast.IsNot):
                none = isinstance(test.ops[0], ast.Is) is outcome
                scope[test.left.id] = NOTHING if none else value.value


def _join(scope: Environment, ends: Sequence[dict[str, Value]]) -> None:
    """Continue with what holds at the end of each branch."""
    # What is known of attributes holds inside of a branch.
    names = dict.fromkeys(name for end in ends for name in end if "." not in name)
    for name in names:
        values = [end[name] for end in ends if name in end]
        value = values[0]
        for each in values[1:]:
            value = joined(value, each)
        scope[name] = value


def _alike(before: Environment, after: Environment) -> bool:
    return before.keys() == after.keys() and all(_outline(before[n]) == _outline(after[n]) for n in after)


def _outline(value: Value) -> object:
    """A value without the names of sizes."""
    if isinstance(value, Tensor):
        return [dim if is_positional(dim) else None for dim in value.dims]
    if isinstance(value, Items):
        return [_outline(each) for each in value.values]
    if isinstance(value, Many | Maybe):
        return [type(value), _outline(value.value)]
    return PLAIN if isinstance(value, Plain) else value
