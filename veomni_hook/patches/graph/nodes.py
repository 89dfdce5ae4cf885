"""Nodes of an expression graph: one operation on other nodes, immutable, equal if they compute the same.

Equality and hash go by `Node.key`, a digest of the operation and its operands; of `COMMUTATIVE` operations
the order of operands does not count. Where a node comes from (`Node.origin`) never counts.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Hashable, Iterable, Iterator
from hashlib import blake2b

__all__ = ["COMMUTATIVE", "Node", "constant", "is_constant", "rebuild", "walk"]

#: Operations whose two operands may change places. Association stays: (a * b) * c is not a * (b * c).
COMMUTATIVE = frozenset({"add", "mul", "eq", "ne"})


class Node:
    """An operation on nodes.

    Attributes:
        op: the operation (``mul``, ``cast``, ``argument``, ...).
        args: what it is applied to, in the order of the source.
        value: what else belongs to it: a name, a constant.
        origin: the upstream expression that it stands for, if there is one.
        key: what two nodes share exactly if they are equal.
        depth: how many nodes lie on the longest way down, itself included.
        facts: what has been found out about the node, by those who did.
    """

    __slots__ = ("args", "depth", "facts", "key", "op", "origin", "value")

    key: bytes
    depth: int

    def __init__(
        self,
        op: str,
        args: tuple[Node, ...] = (),
        value: Hashable = None,
        origin: ast.expr | None = None,
    ) -> None:
        self.op = op
        self.args = args
        self.value = value
        self.origin = origin
        self.facts: dict[str, Node | None] = {}
        self.depth = 1 + max([argument.depth for argument in args], default=0)
        keys = [argument.key for argument in args]
        if op in COMMUTATIVE:
            keys.sort()
        text = f"{op} {value!a} {len(keys)} ".encode()
        self.key = blake2b(text + b"".join(keys), digest_size=16).digest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Node) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        if self.op in ("argument", "constant", "global"):
            return f"{self.value}"
        if self.op == "attribute":
            return f"self.{self.value}"
        parts = [repr(argument) for argument in self.args]
        if self.value is not None:
            parts.append(f"{self.value!r}")
        return f"{self.op}({', '.join(parts)})"

    @property
    def lineno(self) -> int:
        """The upstream line of the nearest origin at or below this node; 0 if there is none."""
        return next((node.origin.lineno for node in walk(self) if node.origin is not None), 0)

    def at(self, origin: ast.expr | None) -> Node:
        """The same node with another origin."""
        return self if origin is self.origin else Node(self.op, self.args, self.value, origin)


def constant(value: Hashable, origin: ast.expr | None = None) -> Node:
    """A literal. Numbers of different types are different: ``1``, ``1.0`` and ``True``."""
    return Node("constant", (), value, origin)


def is_constant(node: Node, value: Hashable) -> bool:
    """Whether ``node`` is this very literal, of this type."""
    return node.op == "constant" and type(node.value) is type(value) and node.value == value


def walk(*roots: Node) -> Iterator[Node]:
    """Every node under ``roots``, each once, parents first."""
    seen: set[bytes] = set()
    todo = list(reversed(roots))
    while todo:
        node = todo.pop()
        if node.key not in seen:
            seen.add(node.key)
            yield node
            todo.extend(reversed(node.args))


def rebuild(node: Node, replace: Callable[[Node], Node | None], make: Callable[[Node], Node]) -> Node:
    """Replace nodes, from the leaves up.

    Args:
        node: the graph.
        replace: a node to what stands for it, or None to look at its operands.
        make: puts a node with changed operands into normal form.
    """
    done: dict[bytes, Node] = {}
    todo = [node]
    while todo:
        current = todo[-1]
        if current.key in done:
            todo.pop()
            continue
        replaced = replace(current)
        if replaced is None:
            missing = [argument for argument in current.args if argument.key not in done]
            if missing:
                todo.extend(missing)
                continue
            replaced = _with_args(current, [done[argument.key] for argument in current.args], make)
        done[current.key] = replaced
        todo.pop()
    return done[node.key]


def _with_args(node: Node, args: Iterable[Node], make: Callable[[Node], Node]) -> Node:
    changed = tuple(args)
    if all(new is old for new, old in zip(changed, node.args, strict=True)):
        return node
    return make(Node(node.op, changed, node.value, node.origin))
