"""The state while a function is followed: values of names, calls so far, what may share memory."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Set

from veomni_hook.patches.graph.arithmetic import branch
from veomni_hook.patches.graph.nodes import Node
from veomni_hook.patches.graph.scope import Scope

__all__ = ["Frame", "Trace", "UnclearError", "fresh", "merged", "roots"]

# Operations whose result has its own memory.
_FRESH = frozenset(
    "add sub mul div floordiv mod pow square sqrt rsqrt neg abs exp log sigmoid tanh relu silu gelu softplus "
    "softmax log_softmax matmul bmm linear mean sum clone cat stack zeros zeros_like ones_like one_hot where "
    "index_add masked_fill setitem repeat repeat_interleave maximum minimum scatter scatter_add gather "
    "index_select cumsum clamp clamp_min clamp_max sin cos outer arange eq ne lt le logical_not logical_and "
    "logical_or".split()
)
# Operations whose result may be, or may be a view of, the first operand.
_VIEWS = frozenset(
    "cast slice select unsqueeze squeeze transpose permute reshape expand expand_as reshape_as flatten "
    "unflatten chunk split unbind item part index to_device detach within view_as_real view_as_complex "
    "getattr carried".split()
)
# Operations that return a sequence of tensors, each with its own memory.
_APART = frozenset(("topk", "sort"))
# Operations whose result may be, or may be a view of, any operand.
_KEEPERS = frozenset("tuple branch call loop and or dict star".split())
_STEPS = 20_000


class UnclearError(Exception):
    """The code does something that the canonical form does not express.

    ``writes`` says that it changes a tensor that other code may see.
    """

    def __init__(self, reason: str, node: ast.AST | None = None, *, writes: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.writes = writes
        self.lineno: int = getattr(node, "lineno", 0)


class Trace:
    """What all frames of one evaluation share.

    Attributes:
        scope: the module's names.
        calls: the opaque calls, in the order of evaluation.
        effects: other side effects, in order.
        inlined: functions and methods of the file that were followed, by name.
        loops: the number of loops that have been entered.
        changes: how often an expression has changed the value of a name.
    """

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.calls: list[Node] = []
        self.effects: list[Node] = []
        self.inlined: dict[str, None] = {}
        self.loops = 0
        self.changes = 0
        self._serials: Counter[bytes] = Counter()
        self._steps = 0

    def step(self, node: ast.AST) -> None:
        """Count one piece of code; a function that is too long is not followed."""
        self._steps += 1
        if self._steps > _STEPS:
            raise UnclearError("the function is too long to be followed", node)

    def opaque(self, call: Node, names: tuple[str, ...]) -> Node:
        """A call of unknown code: two identical calls have different results."""
        serial = self._serials[call.key]
        self._serials[call.key] += 1
        made = Node("call", call.args, (len(call.args) - 1 - len(names), names, serial), call.origin)
        self.calls.append(made)
        return made


class Frame:
    """The names of one function that is being followed.

    Attributes:
        values: local names, and ``self.<name>`` for attributes that were set.
        owner: the class of ``self``.
        home: the class that defines the method.
        receiver: the method's name for its instance.
        local: every name that is local to the function.
        depth: the number of followed calls around it.
        loops: the number of its loops that are open.
        borrowed: values that belong to the caller.
    """

    def __init__(self, values: dict[str, Node], local: Set[str], depth: int) -> None:
        self.values = values
        self.local = local
        self.depth = depth
        self.owner: ast.ClassDef | None = None
        self.home: ast.ClassDef | None = None
        self.receiver = ""
        self.loops = 0
        self.borrowed: frozenset[Node] = frozenset()

    def fork(self) -> Frame:
        """A copy of this frame for another branch."""
        other = Frame(dict(self.values), self.local, self.depth)
        other.owner, other.home, other.receiver, other.loops = (
            self.owner,
            self.home,
            self.receiver,
            self.loops,
        )
        return other

    def holders(self, node: Node) -> list[str]:
        """Every name whose value may share memory with ``node``."""
        names = []
        for name, value in self.values.items():
            found = set(roots(value))
            # A sequence also holds its elements; another element of it does not.
            if node in found or (node.op == "item" and value.op != "item" and node.args[0] in found):
                names.append(name)
        return names


def fresh(node: Node) -> bool:
    """Whether a value has its own memory, which no argument and no attribute can share."""
    if node.op == "branch":
        return fresh(node.args[1]) and fresh(node.args[2])
    if node.op == "item" and node.args[0].op in _APART:
        return True
    return node.op in _FRESH or "own" in node.facts or (node.op == "carried" and fresh(node.args[0]))


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


def merged(test: Node, met: dict[str, Node], unmet: dict[str, Node]) -> dict[str, Node]:
    """The values after two branches have joined; a name that one branch does not bind is ``unbound``."""
    values = {}
    for name in (*met, *(name for name in unmet if name not in met)):
        one, other = met.get(name), unmet.get(name)
        if one is None or other is None or "unbound" in (one.op, other.op):
            values[name] = Node("unbound", (), name)
        else:
            values[name] = branch(test, one, other)
    return values
