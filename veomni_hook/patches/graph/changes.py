"""Changes: of a tensor in place, and of names in a `for` loop.

A name that is bound before the loop and changed in it is carried between iterations. In the body its node is
``carried``, and the current element of the iterable is ``each``. After the loop its node is ``loop``: of the
iterable, and of the start and step of every carried value that it depends on.
"""

from __future__ import annotations

import ast

from veomni_hook.patches.code.tree import in_text_order, walk_ast
from veomni_hook.patches.graph.nodes import UNBOUND, Node, rebuild, walk
from veomni_hook.patches.graph.normal_forms import renormalised
from veomni_hook.patches.graph.operations import is_fresh, is_number, roots
from veomni_hook.patches.interpreter.domain import Frame, UnclearError
from veomni_hook.patches.interpreter.walk import assign, evaluate, run

__all__ = ["loop", "write"]


def loop(statement: ast.For, frame: Frame[Node], number: int) -> None:
    """Follow a loop once, for any iteration, and store the values after the last one in ``frame``.

    Args:
        statement: the loop.
        frame: the names around it.
        number: how many loops have been entered before it.

    Raises:
        UnclearError: the loop is left early, or has effects.
    """
    if statement.orelse:
        raise UnclearError("else of a loop", statement)
    iterable = evaluate(statement.iter, frame)
    before = dict(frame.values)
    nodes = in_text_order(node for node in walk_ast(statement) if isinstance(node, ast.Name))
    bound = list(dict.fromkeys(node.id for node in nodes if not isinstance(node.ctx, ast.Load)))
    written = _written_names(statement)
    new = [name for name in bound if name not in before]
    names = [name for name in dict.fromkeys((*bound, *written)) if name in before]
    carried = {name: Node("carried", (before[name],), ("open", number, n)) for n, name in enumerate(names)}
    inner = frame.fork()
    inner.loops += 1
    inner.values.update(carried)
    inner.values.update((name, UNBOUND) for name in new)
    assign(statement.target, Node("each", (), ("open", number)), inner)
    if run(statement.body, inner) is not None:
        raise UnclearError("a loop is left before its end", statement)
    if inner.effects:
        raise UnclearError("a loop has effects", statement)
    for name, value in inner.values.items():
        if name in before and name not in carried and value is not before[name]:
            raise UnclearError(f"{name} is changed in a loop in a way that is not followed", statement)
    for name in written:
        if name in carried and _may_be_shared(name, carried[name], inner):
            raise UnclearError(f"{name}, changed in place, may be shared", statement, writes=True)
    steps = {carried[name].key: (carried[name], before[name], inner.values[name]) for name in names}
    for name in names:
        if inner.values[name] != carried[name]:
            frame.values[name] = _final_value(carried[name], iterable, steps, number)
    frame.values.update((name, UNBOUND) for name in new)


def _may_be_shared(name: str, start: Node, frame: Frame[Node]) -> bool:
    """Whether the value of ``name`` has changed in an iteration, and may be that of another name as well."""
    end = frame.values.get(name)
    if end is None or end == start or is_number(end):
        return False
    return not is_fresh(end) or names_sharing(end, frame) != [name]


def _final_value(
    carried: Node, iterable: Node, steps: dict[bytes, tuple[Node, Node, Node]], number: int
) -> Node:
    """The value of a carried name after the loop, in terms of only those carried values that it depends on.

    Args:
        carried: its value in the body.
        iterable: what the loop runs over.
        steps: each carried value, with the name's values before the loop and after one iteration, by its key.
        number: of the loop.
    """
    needed = [carried]
    for symbol in needed:
        operands = (node for node in walk(steps[symbol.key][2]) if node.key in steps)
        needed.extend(node for node in operands if node not in needed)
    parts = [iterable]
    for symbol in needed:
        parts += steps[symbol.key][1:]
    # Numbered by the loops inside, so that loops before and around this one make no difference.
    inside = [node.value for node in walk(*parts) if node.op == "loop" and isinstance(node.value, int)]
    height = max(inside, default=-1) + 1
    closed = {symbol.key: Node("carried", symbol.args, (height, n)) for n, symbol in enumerate(needed)}
    closed[Node("each", (), ("open", number)).key] = Node("each", (), height)
    values = [rebuild(part, lambda node: closed.get(node.key), renormalised) for part in parts[1:]]
    return Node("loop", (iterable, *values), height)


def _written_names(statement: ast.For) -> list[str]:
    """Names whose value the loop may change in place, in text order."""
    targets: list[ast.expr] = []
    for node in walk_ast(statement):
        match node:
            case ast.Call(func=ast.Attribute(value=target, attr=name)) if name.endswith("_"):
                targets.append(target)
            case ast.Subscript(value=target, ctx=ast.Store() | ast.Del()):
                targets.append(target)
            case ast.AugAssign(target=target):
                targets.append(target)
    names = (target for target in targets if isinstance(target, ast.Name))
    return list(dict.fromkeys(target.id for target in in_text_order(names)))


def names_sharing(node: Node, frame: Frame[Node]) -> list[str]:
    """Every name whose value may share memory with ``node``."""
    names = []
    for name, value in frame.values.items():
        shared = set(roots(value))
        # A sequence also holds its elements; another element of it does not.
        if node in shared or (node.op == "item" and value.op != "item" and node.args[0] in shared):
            names.append(name)
    return names


def write(target: ast.expr, old: Node, new: Node, frame: Frame[Node]) -> Node:
    """Record an in-place change of a tensor: from here on its name holds ``new``.

    Raises:
        UnclearError: the tensor may share memory with an argument, an attribute or another name's value.
    """
    if not is_fresh(old) or not frame.borrowed.isdisjoint(roots(old)):
        raise UnclearError("a tensor that is not the function's own is changed in place", target, writes=True)
    frame.domain.changes += 1
    new.facts["own"] = None
    names = names_sharing(old, frame)
    if isinstance(target, ast.Name) and names == [target.id]:
        frame.values[target.id] = new
    elif names:
        raise UnclearError(
            f"a tensor that {', '.join(names)} may share is changed in place", target, writes=True
        )
    return new
