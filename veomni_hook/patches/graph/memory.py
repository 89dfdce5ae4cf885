"""Which values may share memory, and changes of a tensor in place."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from veomni_hook.patches.graph.nodes import Node
from veomni_hook.patches.interpreter.domain import Frame, UnclearError

__all__ = ["is_fresh", "names_sharing", "roots", "write"]

# Operations whose result has its own memory.
_FRESH = frozenset(
    "add sub mul div floordiv mod pow square sqrt rsqrt neg abs exp log sigmoid tanh relu silu gelu softplus "
    "softmax log_softmax matmul bmm linear mean sum clone cat stack zeros zeros_like ones_like one_hot where "
    "index_add masked_fill setitem repeat repeat_interleave maximum minimum scatter scatter_add gather "
    "index_select cumsum clamp clamp_min clamp_max sin cos outer arange eq ne lt le logical_not logical_and "
    "logical_or".split()
)
# Operations that return a sequence of tensors, each with its own memory.
_FRESH_PARTS = frozenset(("topk", "sort"))
# Operations whose result may be, or may be a view of, the first operand.
_VIEWS = frozenset(
    "cast slice select unsqueeze squeeze transpose permute reshape expand expand_as reshape_as flatten "
    "unflatten chunk split unbind item part index to_device detach within view_as_real view_as_complex "
    "getattr carried".split()
)
# Operations whose result may be, or may be a view of, any operand.
_KEEPERS = frozenset("tuple branch call loop and or dict star".split())


def is_fresh(node: Node) -> bool:
    """Whether a value has its own memory, which no argument and no attribute can share."""
    if node.op == "branch":
        return is_fresh(node.args[1]) and is_fresh(node.args[2])
    if node.op == "item" and node.args[0].op in _FRESH_PARTS:
        return True
    return node.op in _FRESH or "own" in node.facts or (node.op == "carried" and is_fresh(node.args[0]))


def roots(node: Node) -> Iterator[Node]:
    """The values whose memory ``node`` may share, itself included."""
    todo, seen = [node], set()
    while todo:
        current = todo.pop()
        if current.key in seen:
            continue
        seen.add(current.key)
        if current.op in _KEEPERS:
            todo.extend(current.args)
        elif current.op in _VIEWS:
            todo.append(current.args[0])
        yield current


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
