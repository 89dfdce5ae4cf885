"""What both domains of layer code share: lists, branches, and the values behind them."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence

from veomni_hook.patches.idioms.layer_loop.values import (
    EMPTY,
    PLAIN,
    Items,
    Many,
    Plain,
    Value,
    all_joined,
    joined,
)
from veomni_hook.patches.interpreter.domain import Domain, Frame
from veomni_hook.patches.interpreter.walk import assign, evaluate, run
from veomni_hook.patches.site import Missed

__all__ = ["Collections"]


class Collections(Domain[Value]):
    """Values of branches are joined; comprehensions are followed for one element, or for each known one."""

    most_steps = 10_000_000

    def constant(self, value: object, node: ast.expr | None = None) -> Value:
        return Plain(value)

    def other(self, node: ast.expr, frame: Frame[Value]) -> Value:
        match node:
            case ast.JoinedStr():
                return PLAIN
            case ast.Starred(value=value):
                return evaluate(value, frame)
            case ast.Dict(values=parts):
                return Many(all_joined(evaluate(part, frame) for part in parts))
            case (
                ast.ListComp(elt=element, generators=[generator])
                | ast.GeneratorExp(elt=element, generators=[generator])
            ) if not generator.ifs:
                return self._comprehension(element, generator, frame)
            case ast.DictComp(value=element, generators=[generator]) if not generator.ifs:
                values = self._comprehension(element, generator, frame)
                return Many(all_joined(values.values)) if isinstance(values, Items) else values
            case ast.ListComp() | ast.GeneratorExp() | ast.DictComp():
                raise Missed("a comprehension that is not followed", node)
        raise Missed(f"{type(node).__name__} is not followed", node)

    def _comprehension(
        self, element: ast.expr, generator: ast.comprehension, frame: Frame[Value]
    ) -> Items | Many:
        values, inner = evaluate(generator.iter, frame), frame.fork()
        if not isinstance(values, Items | Many | Plain):
            raise Missed("a comprehension that is not followed", element)
        results = []
        alike = (values.value if isinstance(values, Many) else PLAIN,)
        for value in values.values if isinstance(values, Items) else alike:
            assign(generator.target, value, inner)
            results.append(evaluate(element, inner))
        return Items(tuple(results)) if isinstance(values, Items) else Many(results[0])

    def sequence(self, node: ast.Tuple | ast.List, frame: Frame[Value]) -> Value:
        values: list[Value] = []
        for part in node.elts:
            value = evaluate(part, frame)
            if not isinstance(part, ast.Starred):
                values.append(value)
            elif isinstance(value, Plain) and len(node.elts) == 1:
                return Many(PLAIN)
            elif isinstance(value, Items):
                values += value.values
            else:
                raise Missed("a tuple of unknown length", node)
        return Items(tuple(values))

    def branch(self, test: Value, met: Value, unmet: Value, node: ast.expr | None = None) -> Value:
        return joined(met, unmet)

    def join(
        self,
        frame: Frame[Value],
        test: Value,
        sides: Sequence[Frame[Value]],
        results: Sequence[Value | None],
    ) -> None:
        ends = [side for side, result in zip(sides, results, strict=True) if result is None] or sides
        self.go_on(frame, [end.values for end in ends])

    def go_on(self, frame: Frame[Value], ends: Sequence[dict[str, Value]]) -> None:
        """Continue with what holds at the end of each branch."""
        # What is known of attributes holds inside of a branch.
        names = dict.fromkeys(name for end in ends for name in end if "." not in name)
        frame.values = {name: all_joined(end[name] for end in ends if name in end) for name in names}

    def raised(self) -> Value:
        return EMPTY

    def within(
        self, contexts: Iterable[ast.withitem], frame: Frame[Value], body: Sequence[ast.stmt]
    ) -> Value | None:
        return run(body, frame)
