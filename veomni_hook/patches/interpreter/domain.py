"""What the values of an evaluation are: the interface between the walk over code and a kind of value."""

from __future__ import annotations

import ast
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from veomni_hook.patches.site import Missed

__all__ = ["Domain", "Frame", "UnclearError"]

V = TypeVar("V")


class UnclearError(Missed):
    """The code does something that the values of a domain do not express.

    Attributes:
        writes: whether it changes a tensor that other code may see.
    """

    def __init__(self, words: str, node: ast.AST | None = None, *, writes: bool = False) -> None:
        super().__init__(words, node)
        self.writes = writes


@dataclass(eq=False)
class Frame(Generic[V]):
    """The names of one function that is being followed.

    Attributes:
        domain: what values are.
        values: local names, and ``self.<name>`` for attributes that are known.
        local: every name that is local to the function; a name that is not may be global.
        depth: the number of followed calls around it.
        owner: the class of ``self``.
        home: the class that defines the method.
        loops: the number of its loops that are open.
        contexts: the number of its ``with`` blocks that are open.
        borrowed: values that belong to the caller.
        effects: side effects so far, in order; a followed function shares those of its caller.
    """

    domain: Domain[V]
    values: dict[str, V]
    local: Set[str] = frozenset()
    depth: int = 0
    owner: ast.ClassDef | None = None
    home: ast.ClassDef | None = None
    loops: int = 0
    contexts: int = 0
    borrowed: frozenset[V] = frozenset()
    effects: list[V] = field(default_factory=list)

    def fork(self, values: Mapping[str, V] | None = None) -> Frame[V]:
        """A copy of this frame for another branch, with effects of its own."""
        return replace(self, values=dict(self.values if values is None else values), effects=[])


class Domain(ABC, Generic[V]):
    """What values are, and what code does with them.

    Every method raises `Missed`, or `UnclearError`, for code that its values do not express.

    Attributes:
        most_steps: how many statements and expressions are followed.
        unbound: the value of a name that only one side of a branch binds.
        changes: how often an expression has changed the value of a name.
        followed: functions and methods (``Class.name``) of the file that were followed, in order.
    """

    most_steps = 20_000
    unbound: V | None = None

    def __init__(self) -> None:
        self.changes = 0
        self.followed: dict[str, None] = {}
        self._steps = 0

    def step(self, node: ast.AST, value: V | None = None) -> None:
        """Count one piece of code, with its value if it is an expression; there is a limit."""
        self._steps += 1
        if self._steps > self.most_steps:
            raise UnclearError("the function is too long to be followed", node)

    # Values

    @abstractmethod
    def constant(self, value: object, node: ast.expr | None = None) -> V:
        """A constant."""

    @abstractmethod
    def free(self, node: ast.Name, frame: Frame[V]) -> V:
        """A name that is not bound in the frame."""

    @abstractmethod
    def attribute(self, value: V, node: ast.Attribute, frame: Frame[V]) -> V:
        """``value.<name>``."""

    @abstractmethod
    def binary(self, operator: ast.operator, left: V, right: V, node: ast.expr) -> V:
        """``left <operator> right``."""

    @abstractmethod
    def unary(self, value: V, node: ast.UnaryOp) -> V:
        """``<operator> value``."""

    @abstractmethod
    def compare(self, values: Sequence[V], node: ast.Compare) -> V:
        """A comparison of two values or more."""

    @abstractmethod
    def logic(self, node: ast.BoolOp, frame: Frame[V]) -> V:
        """``and``, ``or``."""

    @abstractmethod
    def sequence(self, node: ast.Tuple | ast.List, frame: Frame[V]) -> V:
        """A tuple or list."""

    @abstractmethod
    def subscript(self, value: V, node: ast.Subscript, frame: Frame[V]) -> V:
        """``value[...]``."""

    @abstractmethod
    def call(self, node: ast.Call, frame: Frame[V]) -> V:
        """A call; `functions` and `walk.evaluate` give its arguments."""

    @abstractmethod
    def other(self, node: ast.expr, frame: Frame[V]) -> V:
        """Any other expression: comprehensions, dictionaries, f-strings."""

    def unclear(self, error: Missed, node: ast.expr) -> V:
        """The value of an expression that is not followed."""
        raise error

    # Branches and loops

    @abstractmethod
    def test(self, node: ast.expr, frame: Frame[V]) -> bool | V:
        """Whether a condition holds; a value if both are possible."""

    def assume(self, node: ast.expr, outcome: bool, frame: Frame[V]) -> None:  # noqa: FBT001 - of the test
        """Note in the frame of a branch what its condition says."""

    @abstractmethod
    def branch(self, test: V, met: V, unmet: V, node: ast.expr | None = None) -> V:
        """One of two values."""

    @abstractmethod
    def join(self, frame: Frame[V], test: V, sides: Sequence[Frame[V]], results: Sequence[V | None]) -> None:
        """Continue in a frame with the values and effects of two forks, of which each returned a result."""

    @abstractmethod
    def raised(self) -> V:
        """What a block that raises an error returns."""

    def left(self, test: V, results: Sequence[V | None], statement: ast.stmt, frame: Frame[V]) -> V | None:
        """What a block returns that one of two sides leaves."""
        if frame.loops:
            raise UnclearError("a loop is left before its end", statement)
        if frame.contexts and None in results:
            # The side that does not leave goes on behind the block, whose statements are not known here.
            raise UnclearError("a block under a context is left before its end", statement)
        met, unmet = (self.constant(None) if result is None else result for result in results)
        return self.branch(test, met, unmet)

    def left_out(self, error: Missed, test: ast.expr, block: Sequence[ast.stmt], frame: Frame[V]) -> V:
        """What a block under a condition returns that cannot be followed, if the domain leaves it out."""
        raise error

    def knows(self, statement: ast.If | ast.Assert, frame: Frame[V]) -> bool:
        """Whether the domain knows a statement as a whole, and has done what it does."""
        return False

    @abstractmethod
    def loop(self, statement: ast.For, frame: Frame[V]) -> None:
        """A ``for`` loop."""

    @abstractmethod
    def within(self, contexts: Iterable[ast.withitem], frame: Frame[V], body: Sequence[ast.stmt]) -> V | None:
        """A block in contexts: what it returns, or None."""

    # Assignments

    @abstractmethod
    def augmented(self, node: ast.AugAssign, frame: Frame[V]) -> None:
        """``target <operator>= value``."""

    @abstractmethod
    def store(self, target: ast.expr, value: V, frame: Frame[V]) -> None:
        """Assign to a target that is not a name and not several: a part, or an attribute."""

    @abstractmethod
    def unpacked(self, value: V, targets: Sequence[ast.expr]) -> Sequence[V]:
        """The value that each of several targets gets."""

    @abstractmethod
    def statement(self, node: ast.stmt, frame: Frame[V]) -> None:
        """Any other statement: ``del``, ``import``, a nested function."""
