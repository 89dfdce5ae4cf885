"""`for` loops: how one iteration changes the values of the previous one, and the final values.

A name that is bound before the loop and changed in it is carried between iterations. In the body its node is
``carried``, and the current element of the iterable is ``each``. After the loop its node is ``loop``: of the
iterable, and of the start and step of every carried value that it depends on.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence

from veomni_hook.patches.graph.dtypes import is_number
from veomni_hook.patches.graph.interpreter.expressions import evaluate
from veomni_hook.patches.graph.nodes import Node, rebuild, walk
from veomni_hook.patches.graph.normal_forms import renewed
from veomni_hook.patches.graph.interpreter.state import Frame, Trace, UnclearError, fresh
from veomni_hook.patches.text.walk import child_nodes

__all__ = ["loop"]

_Run = Callable[[Sequence[ast.stmt], Frame, Trace], Node | None]
_Store = Callable[[ast.expr, Node, Frame, Trace], None]


def loop(statement: ast.For, frame: Frame, trace: Trace, run: _Run, store: _Store) -> None:
    """Follow a loop once, for any iteration, and store the values after the last one in ``frame``.

    Raises:
        UnclearError: the loop is left early, or has effects.
    """
    if statement.orelse:
        raise UnclearError("else of a loop", statement)
    iterable = evaluate(statement.iter, frame, trace)
    number, effects = trace.loops, len(trace.effects)
    trace.loops += 1
    before = dict(frame.values)
    new = [name for name in _stored(statement) if name not in before]
    names = [name for name in _changed(statement) if name in before]
    carried = {name: Node("carried", (before[name],), ("open", number, n)) for n, name in enumerate(names)}
    inner = frame.fork()
    inner.loops += 1
    inner.values.update(carried)
    inner.values.update((name, Node("unbound", (), name)) for name in new)
    store(statement.target, Node("each", (), ("open", number)), inner, trace)
    if run(statement.body, inner, trace) is not None:
        raise UnclearError("a loop is left before its end", statement)
    if len(trace.effects) > effects:
        raise UnclearError("a loop has effects", statement)
    _check(statement, before, carried, inner)
    steps = {carried[name].key: (carried[name], before[name], inner.values[name]) for name in names}
    for name in names:
        if inner.values[name] != carried[name]:
            frame.values[name] = _result(carried[name], iterable, steps, number)
    frame.values.update((name, Node("unbound", (), name)) for name in new)


def _check(statement: ast.For, before: dict[str, Node], carried: dict[str, Node], inner: Frame) -> None:
    for name, value in inner.values.items():
        if name in before and name not in carried and value is not before[name]:
            raise UnclearError(f"{name} is changed in a loop in a way that is not followed", statement)
    for name in _written(statement):
        left = inner.values.get(name)
        if name not in carried or left is None or left == carried[name]:
            continue
        if not is_number(left) and (not fresh(left) or inner.holders(left) != [name]):
            raise UnclearError(f"{name}, changed in place, may be shared", statement, writes=True)


def _result(wanted: Node, iterable: Node, steps: dict[bytes, tuple[Node, Node, Node]], number: int) -> Node:
    """The final value of a carried name, in terms of only those carried values that it depends on."""
    order = [wanted]
    for symbol in order:
        found = (node for node in walk(steps[symbol.key][2]) if node.key in steps)
        order.extend(node for node in found if node not in order)
    parts = [iterable]
    for symbol in order:
        parts += steps[symbol.key][1:]
    # Numbered by the loops inside, so that loops before and around this one make no difference.
    inside = [node.value for node in walk(*parts) if node.op == "loop" and isinstance(node.value, int)]
    height = max(inside, default=-1) + 1
    names = {symbol.key: Node("carried", symbol.args, (height, n)) for n, symbol in enumerate(order)}
    names[Node("each", (), ("open", number)).key] = Node("each", (), height)
    closed = [rebuild(part, lambda node: names.get(node.key), renewed) for part in parts[1:]]
    return Node("loop", (iterable, *closed), height)


def _changed(statement: ast.For) -> list[str]:
    """Names that the loop binds or whose value it may change in place, in text order."""
    return list(dict.fromkeys((*_stored(statement), *_written(statement))))


def _written(statement: ast.For) -> list[str]:
    """Names whose value the loop may change in place."""
    names: dict[str, None] = {}
    for node in _ordered(statement):
        target: ast.AST | None = None
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr.endswith("_")
        ):
            target = node.func.value
        elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            target = node.value
        elif isinstance(node, ast.AugAssign):
            target = node.target
        if isinstance(target, ast.Name):
            names[target.id] = None
    return list(names)


def _stored(statement: ast.For) -> list[str]:
    return list(
        dict.fromkeys(
            node.id
            for node in _ordered(statement)
            if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)
        )
    )


def _ordered(statement: ast.For) -> list[ast.AST]:
    found: list[ast.AST] = []
    todo: list[ast.AST] = [statement]
    while todo:
        node = todo.pop()
        found.append(node)
        todo.extend(reversed(list(child_nodes(node))))
    return found
