"""Templates: statements of upstream's code as a reader writes them down, with holes and choices.

A name in capitals is a hole: any expression where one is read, elsewhere an identifier (what is assigned, an
attribute, a parameter). The same hole is the same code. What a template assigns is read there and after that
only. ``*REST`` and ``**REST`` in a call are all remaining arguments, unless the template assigns REST.
Between statements stand

    ...                     any statements
    if maybe: A             A, or nothing
    if either: A else: B    A, or B
    while some: A; B        the single statements A and B, in any order and number

A function of torch is written with its full name, and is the same under any name that the module gives it.
What does not match is a `Mismatch`: the statement up to which the code is what the template says.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from veomni_hook.patches.code.comparison import Bound, Capture, CaptureKind, Matching
from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.tree import blocks, chain, walk_ast

__all__ = ["Found", "Mismatch", "Template", "branches"]

_Resolve: TypeAlias = "Callable[[ast.expr], str]"
#: Stands for one statement, whatever it is.
_ANY = ast.Pass()
#: Nodes that match no other kind of node, so most of the nodes of a function are done with at once.
_ALONE: dict[type[ast.AST], type[ast.AST] | tuple[type[ast.AST], ...]] = {
    ast.Assign: (ast.Assign, ast.AnnAssign),
    ast.Call: ast.Call,
    ast.Subscript: ast.Subscript,
}
_HOLE = re.compile(r"[A-Z][A-Z0-9_]*")


@dataclass(frozen=True, slots=True)
class Found:
    """Statements that a template matches, ``block[index:]``, and what its holes stand for."""

    block: Sequence[ast.stmt]
    index: int
    bound: Bound

    @property
    def first(self) -> ast.stmt:
        """The first of the statements."""
        return self.block[self.index]

    def expression(self, hole: str) -> ast.expr:
        """The expression in a hole."""
        (node,) = self.bound[hole].nodes
        assert isinstance(node, ast.expr)  # noqa: S101 - holes for arguments have several nodes
        return node

    def __getitem__(self, hole: str) -> str:
        """The code in a hole, as text; empty for a hole in a part that is absent."""
        capture = self.bound.get(hole)
        return "" if capture is None else ", ".join(map(ast.unparse, capture.nodes))


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Where code stops to be what a template says.

    Attributes:
        node: the statement that is not expected; None if there is nothing more.
        expected: the template's line in its place.
    """

    node: ast.stmt | None
    expected: str

    def __str__(self) -> str:
        """Say what there is in place of what."""
        present = "nothing more" if self.node is None else _first_line(self.node)
        return f"{present} in place of {self.expected}"


class Template:
    """A parsed template.

    Args:
        text: the template.
        names: holes that stand for names alone, apart from those that the template assigns, in one text.

    Raises:
        SyntaxError: the text is not Python.
    """

    def __init__(self, text: str, names: str = "") -> None:
        tree = ast.parse(text)
        self._names = frozenset(names.split())
        self.statements = tree.body
        only = tree.body[0]
        self.expression = only.value if len(tree.body) == 1 and isinstance(only, ast.Expr) else None
        self._assigned = {
            node.id
            for node in walk_ast(tree)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and _hole(node)
        }

    def find(
        self, among: Iterable[Sequence[ast.stmt]], resolve: _Resolve | None = None, **names: str
    ) -> Found | Mismatch:
        """Return the first statement of a block from which the template matches all that follows.

        Else the difference that is furthest in the text, where at least one statement matched.

        Args:
            among: lists of statements.
            resolve: the full name of an expression, by the module's imports; by default, as it is written.
            names: what holes stand for that the statements do not assign first, as a function's parameters.
        """
        matching, known = self._matching(names, resolve)
        for block in among:
            for index in range(len(block)):
                bound = next(matching.block(self.statements, block[index:], known), None)
                if bound is not None:
                    return Found(block, index, bound)
        return matching.furthest or Mismatch(None, str(self))

    def is_in(self, function: FunctionNode) -> bool:
        """Whether some statements of a function, or an expression of it, are what the template says."""
        if self.expression is None:
            return isinstance(self.find(blocks(function)), Found)
        return any(self.match(node) for node in walk_ast(function))

    def __str__(self) -> str:
        """Return the first line that is no choice."""
        return _first_line(next((one for one in self.statements if not _choices(one)), self.statements[0]))

    def match(self, node: ast.AST, resolve: _Resolve | None = None, **names: str) -> Found | None:
        """Return what a template of one statement, or one expression, matches; arguments as for `find`."""
        pattern = self.statements[0] if self.expression is None else self.expression
        if (kinds := _ALONE.get(type(pattern))) is not None and not isinstance(node, kinds):
            return None
        matching, known = self._matching(names, resolve)
        bound = next(matching.node(pattern, node, known), None)
        return None if bound is None else Found([node] if isinstance(node, ast.stmt) else [], 0, bound)

    def _matching(self, names: Mapping[str, str], resolve: _Resolve | None) -> tuple[_Statements, Bound]:
        known = {hole: Capture("expression", (ast.Name(name, ast.Load()),)) for hole, name in names.items()}
        return _Statements(self._assigned, self._names, len(known), resolve), known


def branches(body: Sequence[ast.stmt]) -> Iterator[Sequence[ast.stmt]]:
    """Yield a block and the blocks in its conditions, outer ones first; none of them runs more than once."""
    yield body
    for statement in body:
        if isinstance(statement, ast.If):
            yield from branches(statement.body)
            yield from branches(statement.orelse)


class _Statements(Matching):
    """Matching with choices between statements.

    Args:
        assigned: the holes that the template assigns.
        names: others that stand for names alone.
        known: how many holes stand for something before anything matches.
        resolve: the full name of an expression.

    Attributes:
        furthest: the last statement in the text, after one that matched, that is not what was expected.
    """

    def __init__(
        self, assigned: Collection[str], names: Collection[str], known: int, resolve: _Resolve | None
    ) -> None:
        super().__init__(_hole)
        self._assigned = assigned
        self._names = names
        self._known = known
        self._resolve = resolve
        self.furthest: Mismatch | None = None

    def node(self, pattern: object, node: object, bound: Bound) -> Iterator[Bound]:
        """Match a node; a name that is read before it is assigned matches nothing."""
        if pattern is _ANY:
            return iter((bound,))
        if isinstance(pattern, ast.Name) and isinstance(pattern.ctx, ast.Load):
            if pattern.id in self._assigned and pattern.id not in bound:
                return iter(())
            if pattern.id in self._names and not isinstance(node, ast.Name):
                return iter(())
        if self._resolve is not None and isinstance(pattern, ast.Attribute) and isinstance(node, ast.expr):
            if (name := chain(pattern)).startswith("torch."):
                return iter((bound,) if self._resolve(node) == name else ())
        return super().node(pattern, node, bound)

    def block(self, patterns: Sequence[ast.stmt], nodes: Sequence[ast.stmt], bound: Bound) -> Iterator[Bound]:
        """Match statements with statements."""
        if not patterns:
            if nodes:
                self._note(nodes[0], "the end", bound)
            else:
                yield bound
            return
        first, rest = patterns[0], patterns[1:]
        if (choices := _choices(first)) is not None:
            for choice in choices:
                yield from self.block([*choice, *rest], nodes, bound)
        elif nodes:
            matched = False
            for one in self.node(first, nodes[0], bound):
                matched = True
                yield from self.block(rest, nodes[1:], one)
            if not matched:
                self._note(nodes[0], _first_line(first), bound)

    def rest(self, argument: ast.expr | ast.keyword) -> tuple[CaptureKind, str] | None:
        """Return the hole of an argument that takes all remaining ones; what is assigned is one argument."""
        taken = super().rest(argument)
        return None if taken is None or taken[1] in self._assigned else taken

    def _note(self, node: ast.stmt, expected: str, bound: Bound) -> None:
        last = self.furthest
        if len(bound) > self._known and (
            last is None or last.node is None or node.lineno >= last.node.lineno
        ):
            self.furthest = Mismatch(node, expected)


def _choices(statement: ast.stmt) -> list[list[ast.stmt]] | None:
    """Return what may stand in place of a statement of a template; None if it stands for itself."""
    match statement:
        case ast.Expr(value=ast.Constant(value=value)) if value is ...:
            return [[], [_ANY, statement]]
        case ast.If(test=ast.Name("maybe")):
            return [statement.body, []]
        case ast.If(test=ast.Name("either")):
            return [statement.body, statement.orelse]
        case ast.While(test=ast.Name("some")):
            return [*([choice, statement] for choice in statement.body), []]
    return None


def _hole(item: object) -> str | None:
    name = item.id if isinstance(item, ast.Name) else item
    return name if isinstance(name, str) and _HOLE.fullmatch(name) else None


def _first_line(node: ast.AST) -> str:
    return ast.unparse(node).splitlines()[0]
