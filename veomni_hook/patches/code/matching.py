"""Matches code with holes against code, by structure.

Annotations, comments, layout and brackets do not count, and explicit keywords match in any order. A hole in
two places is the same code twice. How a hole is written is up to the caller: `Pattern` has ``{name}``,
`Template` a name in capitals.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from veomni_hook.patches.code.fingerprint import serialise, significant_fields

__all__ = ["Bound", "Capture", "CaptureKind", "Matching", "expressions"]

CaptureKind: TypeAlias = Literal["expression", "keywords", "positionals"]


@dataclass(frozen=True, slots=True)
class Capture:
    """The code that a hole matched: an expression, or any number of arguments of a call."""

    kind: CaptureKind
    nodes: tuple[ast.expr | ast.keyword, ...]

    def code(self) -> str:
        """A text that is equal for two captures if and only if they are the same code."""
        return serialise(list(self.nodes))


#: Fields of a node that Python evaluates before the others.
_EVALUATED = frozenset({"generators", "iter"})
#: What each hole stands for.
Bound: TypeAlias = Mapping[str, Capture]


class Matching:
    """Yields each way in which code is what a pattern says.

    Args:
        hole: the name of a hole, from a node or an identifier of a pattern; None if it is none.
    """

    def __init__(self, hole: Callable[[object], str | None]) -> None:
        self._hole = hole

    def block(self, patterns: Sequence[ast.stmt], nodes: Sequence[ast.stmt], bound: Bound) -> Iterator[Bound]:
        """Match statements with statements, one by one."""
        return self._each(patterns, nodes, bound)

    def node(self, pattern: object, node: object, bound: Bound) -> Iterator[Bound]:
        """Match a node, or the plain value of a field."""
        if (name := self._hole(pattern)) is not None:
            found = _filling(pattern, node)
            return iter(()) if found is None else _bind(name, Capture("expression", (found,)), bound)
        if not isinstance(pattern, ast.AST) or not isinstance(node, ast.AST):
            same = type(pattern) is type(node) and serialise(pattern) == serialise(node)
            return iter((bound,) if same else ())
        if isinstance(pattern, ast.Call) and isinstance(node, ast.Call):
            return self._call(pattern, node, bound)
        if isinstance(pattern, ast.Constant) or _kind(pattern) is not _kind(node):
            return iter((bound,) if serialise(pattern) == serialise(node) else ())
        wanted, present = dict(significant_fields(pattern)), dict(significant_fields(node))
        if wanted.keys() != present.keys():
            return iter(())
        # An iterable is evaluated before its items.
        order = sorted(wanted, key=_EVALUATED.__contains__, reverse=True)
        return self._each([wanted[name] for name in order], [present[name] for name in order], bound)

    def rest(self, argument: ast.expr | ast.keyword) -> tuple[CaptureKind, str] | None:
        """Return the hole of an argument in a pattern that takes all remaining ones, with what it takes."""
        if isinstance(argument, ast.keyword):
            name = self._hole(argument.value) if argument.arg is None else None
            return None if name is None else ("keywords", name)
        name = self._hole(argument.value) if isinstance(argument, ast.Starred) else None
        return None if name is None else ("positionals", name)

    def _each(self, patterns: Sequence[Any], nodes: Sequence[Any], bound: Bound) -> Iterator[Bound]:
        if len(patterns) != len(nodes):
            return
        if not patterns:
            yield bound
            return
        for first in self._value(patterns[0], nodes[0], bound):
            yield from self._each(patterns[1:], nodes[1:], first)

    def _value(self, pattern: Any, value: Any, bound: Bound) -> Iterator[Bound]:
        if isinstance(pattern, list) and isinstance(value, list):
            statements = isinstance(pattern[0], ast.stmt)
            return (self.block if statements else self._each)(pattern, value, bound)
        return self.node(pattern, value, bound)

    def _call(self, pattern: ast.Call, node: ast.Call, bound: Bound) -> Iterator[Bound]:
        for called in self.node(pattern.func, node.func, bound):
            for passed in self._positionals(pattern.args, node.args, called):
                yield from self._keywords(pattern.keywords, node.keywords, passed)

    def _positionals(self, patterns: list[ast.expr], nodes: list[ast.expr], bound: Bound) -> Iterator[Bound]:
        for index, pattern in enumerate(patterns):
            if (rest := self.rest(pattern)) is None:
                continue
            stop = len(nodes) - (len(patterns) - index - 1)
            if stop < index:
                return
            for before in self._each(patterns[:index], nodes[:index], bound):
                taken = Capture("positionals", tuple(nodes[index:stop]))
                for between in _bind(rest[1], taken, before):
                    yield from self._each(patterns[index + 1 :], nodes[stop:], between)
            return
        yield from self._each(patterns, nodes, bound)

    def _keywords(
        self, patterns: list[ast.keyword], nodes: list[ast.keyword], bound: Bound
    ) -> Iterator[Bound]:
        explicit = [pattern for pattern in patterns if self.rest(pattern) is None]
        rests = [rest for rest in map(self.rest, patterns) if rest is not None]
        if not explicit:
            if rests:
                yield from _bind(rests[0][1], Capture("keywords", tuple(nodes)), bound)
            elif not nodes:
                yield bound
            return
        others = [pattern for pattern in patterns if pattern is not explicit[0]]
        for index, node in enumerate(nodes):
            if node.arg == explicit[0].arg:
                for one in self.node(explicit[0].value, node.value, bound):
                    yield from self._keywords(others, [*nodes[:index], *nodes[index + 1 :]], one)


def expressions(nodes: Sequence[ast.AST]) -> Iterator[ast.expr]:
    """Every expression in statements; not those inside f-strings, which have no positions in Python 3.11."""
    pending: list[object] = list(nodes)
    while pending:
        node = pending.pop()
        if isinstance(node, list):
            pending.extend(node)
        elif isinstance(node, ast.AST):
            if isinstance(node, ast.expr):
                yield node
            if not isinstance(node, ast.JoinedStr):
                pending.extend(value for _, value in significant_fields(node))


def _filling(pattern: object, node: object) -> ast.expr | None:
    """Return the code that a hole in place of ``node`` stands for: an identifier as a name; None if none."""
    if isinstance(node, str):
        return ast.Name(node, ast.Load())
    if not isinstance(node, ast.expr) or isinstance(node, ast.Starred):
        return None
    read = isinstance(getattr(pattern, "ctx", None), ast.Load | None)
    return node if read or isinstance(node, ast.Name) else None


def _bind(name: str, capture: Capture, bound: Bound) -> Iterator[Bound]:
    known = bound.get(name)
    if known is None:
        yield {**bound, name: capture}
    elif known.code() == capture.code():
        yield bound


def _kind(node: ast.AST) -> type[ast.AST]:
    return ast.Assign if isinstance(node, ast.AnnAssign) and node.value is not None else type(node)
