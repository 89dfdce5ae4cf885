"""What the interpreter knows while it follows a function: values of names, calls and effects so far."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Sequence, Set

from veomni_hook.patches.graph.arithmetic import branch
from veomni_hook.patches.graph.nodes import Node
from veomni_hook.patches.graph.scope import Scope

__all__ = ["Frame", "Trace", "UnclearError"]

_MOST_STEPS = 20_000


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
        evaluate: `expressions.evaluate`, for the files that `expressions` imports.
        run: `statements.run`, for the files that `statements` imports.
        calls: the opaque calls, in the order of evaluation.
        effects: other side effects, in order.
        inlined: functions and methods of the file that were followed, by name.
        loops: the number of loops that have been entered.
        changes: how often an expression has changed the value of a name.
    """

    def __init__(
        self,
        scope: Scope,
        evaluate: Callable[[ast.expr, Frame], Node],
        run: Callable[[Sequence[ast.stmt], Frame], Node | None],
    ) -> None:
        self.scope = scope
        self.evaluate = evaluate
        self.run = run
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
        if self._steps > _MOST_STEPS:
            raise UnclearError("the function is too long to be followed", node)

    def opaque(self, args: tuple[Node, ...], keywords: tuple[str, ...], origin: ast.expr) -> Node:
        """A call of unknown code: two identical calls have different results.

        Args:
            args: the callee, the positional arguments, the values of ``keywords``.
            keywords: their names.
            origin: the upstream expression.
        """
        key = Node("call", args, keywords).key
        serial = self._serials[key]
        self._serials[key] += 1
        call = Node("call", args, (len(args) - 1 - len(keywords), keywords, serial), origin)
        self.calls.append(call)
        return call


class Frame:
    """The names of one function that is being followed.

    Attributes:
        trace: what it shares with the frames around it.
        values: local names, and ``self.<name>`` for attributes that were set.
        local: every name that is local to the function.
        depth: the number of followed calls around it.
        owner: the class of ``self``.
        home: the class that defines the method.
        loops: the number of its loops that are open.
        borrowed: values that belong to the caller.
    """

    def __init__(self, trace: Trace, values: dict[str, Node], local: Set[str], depth: int = 0) -> None:
        self.trace = trace
        self.values = values
        self.local = local
        self.depth = depth
        self.owner: ast.ClassDef | None = None
        self.home: ast.ClassDef | None = None
        self.loops = 0
        self.borrowed: frozenset[Node] = frozenset()

    def fork(self) -> Frame:
        """A copy of this frame for another branch."""
        other = Frame(self.trace, dict(self.values), self.local, self.depth)
        other.owner, other.home, other.loops, other.borrowed = (
            self.owner,
            self.home,
            self.loops,
            self.borrowed,
        )
        return other

    def join(self, test: Node, met: Frame, unmet: Frame) -> None:
        """Take the values of two forks; a name that one of them does not bind is ``unbound``."""
        self.values = {}
        for name in (*met.values, *(name for name in unmet.values if name not in met.values)):
            one, other = met.values.get(name), unmet.values.get(name)
            if one is None or other is None or "unbound" in (one.op, other.op):
                self.values[name] = Node("unbound", (), name)
            else:
                self.values[name] = branch(test, one, other)
