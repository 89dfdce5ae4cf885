"""Nodes of an expression graph: immutable operations on other nodes, equal if they compute the same.

Equality and hash use `Node.key`, a digest of the operation and its operands. For `COMMUTATIVE` operations the
order of operands does not count; the source of a node (`Node.origin`) never does. A `Form` is what a whole
function computes. `source` writes a node as code for guards, `brief` for messages.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from hashlib import blake2b

__all__ = [
    "COMMUTATIVE",
    "UNBOUND",
    "Form",
    "Node",
    "brief",
    "constant",
    "has_source",
    "is_constant",
    "rebuild",
    "source",
    "walk",
]

#: Operations whose operands may be swapped, but not regrouped: (a * b) * c is not a * (b * c).
COMMUTATIVE = frozenset({"add", "mul", "eq", "ne"})


class Node:
    """An operation on nodes.

    Attributes:
        op: the operation (``mul``, ``cast``, ``argument``, ...).
        args: its operands, in the order of the source.
        value: other data of the operation: a name, a constant.
        origin: the upstream expression that the node represents, if there is one.
        key: a digest; two nodes are equal if and only if their keys are.
        depth: the number of nodes on the longest path to a leaf, this node included.
        facts: cached properties and flags, by name.
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
        return brief(self)

    @property
    def lineno(self) -> int:
        """The upstream line of the nearest origin at or below this node; 0 if there is none."""
        return next((node.origin.lineno for node in walk(self) if node.origin is not None), 0)

    def at(self, origin: ast.expr | None) -> Node:
        """The same node with another origin."""
        return self if origin is self.origin else Node(self.op, self.args, self.value, origin)


#: The value of a name that may not be bound.
UNBOUND = Node("unbound")


def constant(value: Hashable, origin: ast.expr | None = None) -> Node:
    """A literal. Numbers of different types are different: ``1``, ``1.0`` and ``True``."""
    return Node("constant", (), value, origin)


def is_constant(node: Node, value: Hashable) -> bool:
    """Whether ``node`` is this literal, of the same type."""
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


def rebuild(
    node: Node,
    replace: Callable[[Node], Node | None],
    make: Callable[[Node], Node],
    done: dict[bytes, Node] | None = None,
) -> Node:
    """Replace nodes, from the leaves up.

    Args:
        node: the graph.
        replace: returns the replacement of a node, or None to continue with its operands.
        make: returns the normal form of a node whose operands have changed.
        done: the results by key, for a ``replace`` that rebuilds other nodes the same way.
    """
    done = {} if done is None else done
    result = done.get(node.key) or replace(node)
    if result is None:
        args = tuple(rebuild(argument, replace, make, done) for argument in node.args)
        kept = all(new is old for new, old in zip(args, node.args, strict=True))
        result = node if kept else make(Node(node.op, args, node.value, node.origin))
    done[node.key] = result
    return result


@dataclass(frozen=True, slots=True)
class Form:
    """What a function computes.

    Attributes:
        arguments: its parameters, in order, without ``self``.
        result: its return value.
        effects: its side effects, in order: attributes that it sets, calls whose result it does not use.
        inlined: the functions and methods (``Class.name``) of the file that were followed.
        receiver: the method's name for its instance; empty for a function.
        lineno: the line of the function.
    """

    arguments: tuple[str, ...]
    result: Node
    effects: tuple[Node, ...] = ()
    inlined: tuple[str, ...] = ()
    receiver: str = ""
    lineno: int = 0


_OPERATORS = {"is": " is ", "and": " and ", "or": " or ", "eq": " == ", "lt": " < ", "le": " <= "}
_SOURCE = {
    "argument": "{value}",
    "self": "{receiver}",
    "attribute": "{receiver}.{value}",
    "getattr": "{}.{value}",
    "index": "{}[{}]",
    "item": "{}[{}]",
    "device": "{}.device",
    "to_device": "{}.to({})",
    "not": "not ({})",
}
_LONGEST = 90
_DESCRIPTIONS = {
    "add": "({} + {})",
    "sub": "({} - {})",
    "mul": "({} * {})",
    "div": "({} / {})",
    "floordiv": "({} // {})",
    "eq": "({} == {})",
    "lt": "({} < {})",
    "le": "({} <= {})",
    "is": "({} is {})",
    "not": "not {}",
    "neg": "-{}",
    "cast": "{}.to({})",
    "dtype": "{}.dtype",
    "branch": "({1} if {0} else {2})",
}


def source(node: Node, receiver: str = "self") -> str:
    """Code for ``node`` that is valid at the start of a function: ``self.variance_epsilon``.

    Raises:
        ValueError: the node contains more than names, attributes, literals, subscripts and tests of these.
    """
    if not has_source(node):
        raise ValueError(f"{brief(node)} is not code for the start of a function")
    if node.op == "constant":
        return repr(node.value) if node.value is not ... else "..."
    if node.op == "global" and node.origin is not None:
        return ast.unparse(node.origin)
    parts = [source(argument, receiver) for argument in node.args]
    if node.op in _OPERATORS:
        return _OPERATORS[node.op].join(f"({part})" if " " in part else part for part in parts)
    if node.op == "index":
        parts = [parts[0], ", ".join(parts[1:])]
    return _SOURCE[node.op].format(*parts, value=node.value, receiver=receiver)


def has_source(node: Node) -> bool:
    """Whether `source` has code for ``node``."""
    if node.op == "global":
        return node.origin is not None
    known = node.op in _SOURCE or node.op in _OPERATORS or node.op == "constant"
    return known and all(has_source(argument) for argument in node.args)


def brief(node: Node) -> str:
    """A short description of a node for a message."""
    text = _described(node, 3)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _described(node: Node, depth: int) -> str:
    if node.op == "global":
        return str(node.value).lstrip(":.")
    if node.op in ("argument", "constant", "attribute", "self"):
        return source(node)
    if depth == 0:
        return "…"
    parts = [_described(argument, depth - 1) for argument in node.args]
    template = _DESCRIPTIONS.get(node.op)
    if template is not None:
        return template.format(*parts)
    if node.op in ("tuple", "call"):
        called = parts.pop(0) if node.op == "call" else ""
        return f"{called}({', '.join(parts)})"
    return f"{node.op}({', '.join(parts)})"
