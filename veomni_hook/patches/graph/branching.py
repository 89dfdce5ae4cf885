"""The formulas that a form chooses between by tests."""

from __future__ import annotations

from dataclasses import dataclass

from veomni_hook.patches.graph.forms import Form
from veomni_hook.patches.graph.nodes import Node, walk
from veomni_hook.patches.graph.normal_forms import renormalised

__all__ = ["Leaf", "branches", "decided"]

_MOST_TESTS = 6


@dataclass(frozen=True, slots=True)
class Leaf:
    """The value that is computed if ``tests`` have these outcomes."""

    tests: tuple[tuple[Node, bool], ...]
    node: Node


def branches(form: Form | Node) -> list[Leaf]:
    """Every formula that tests choose between, with the tests' outcomes; one leaf if there are no tests.

    Only tests that affect the result count; a test that another one makes redundant is omitted. With more
    than six tests the whole node is one leaf.
    """
    node = form.result if isinstance(form, Form) else form
    leaves: list[Leaf] = []
    todo: list[Leaf] = [Leaf((), node)]
    while todo:
        leaf = todo.pop(0)
        first = next((inner for inner in walk(leaf.node) if inner.op == "branch"), None)
        if first is None:
            leaves.append(leaf)
            continue
        if len(leaf.tests) == _MOST_TESTS:
            return [Leaf((), node)]
        test = first.args[0]
        for outcome in (True, False):
            todo.append(Leaf((*leaf.tests, (test, outcome)), decided(leaf.node, test, outcome=outcome)))
    return leaves


def decided(node: Node, test: Node, *, outcome: bool) -> Node:
    """The graph for this outcome of ``test``."""
    side = 1 if outcome else 2
    done: dict[bytes, Node] = {}

    def visit(current: Node) -> Node:
        result = done.get(current.key)
        if result is None:
            if current.op == "branch" and current.args[0] == test:
                result = visit(current.args[side])
            else:
                args = tuple(visit(argument) for argument in current.args)
                kept = all(new is old for new, old in zip(args, current.args, strict=True))
                result = (
                    current if kept else renormalised(Node(current.op, args, current.value, current.origin))
                )
            done[current.key] = result
        return result

    return visit(node)
