"""Patterns: Python code with holes that is matched against a function by structure.

``{name}`` captures any expression, ``**{name}`` in a call all remaining keyword arguments, ``*{name}`` all
remaining positional ones. Explicit keywords match in any order; a capture used twice must match the same
code twice; annotations, comments, layout and brackets do not count. F-strings are never searched, because
Python 3.11 has no positions inside them. A pattern cannot contain a set of one name.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from tokenize import TokenError

from veomni_hook.errors import PatchError, PatchTargetError
from veomni_hook.patches.code.comparison import Bound, Capture, CaptureKind, Matching, expressions, serialise
from veomni_hook.patches.code.document import Document, FunctionNode
from veomni_hook.patches.code.edit import reindent
from veomni_hook.patches.code.tree import blocks

__all__ = ["Capture", "CaptureKind", "Match", "Pattern", "capture_name", "dedented"]

_BLANK_LINES = re.compile(r"\A(?:[ \t]*\r?\n)+")


@dataclass(frozen=True, slots=True)
class Match:
    """One match of a pattern: an expression, or consecutive statements of one block."""

    nodes: tuple[ast.expr | ast.stmt, ...]
    captures: Mapping[str, Capture]

    def span(self, document: Document) -> tuple[int, int]:
        """Character range from the first node, decorators included, to the end of the last."""
        return document.span(self.nodes[0])[0], document.end(self.nodes[-1])


class Pattern:
    """A parsed pattern.

    Args:
        text: the pattern; common indentation is ignored.
        where: the location for error messages.
        target: the patch's target, for error messages.

    Attributes:
        captures: name of each hole to the kind of code that it captures.
        expression: the expression to find, or None for a pattern of statements.
        statements: the pattern as statements.

    Raises:
        PatchError: the text is not a valid pattern.
    """

    def __init__(self, text: str, *, where: str, target: str = "") -> None:
        self.where = where
        self.target = target
        self.text = dedented(text)
        try:
            self.statements = ast.parse(self.text).body
        except SyntaxError as error:
            raise self._error(
                f"the pattern is not valid Python: {error.msg} (its line {error.lineno})",
                "write Python code in which {name} stands for an expression; a hole cannot be assigned to",
            ) from error
        if not self.statements:
            raise self._error("the pattern is empty", "write the code to find")
        only = self.statements[0] if len(self.statements) == 1 else None
        self.expression = only.value if isinstance(only, ast.Expr) else None
        self.captures: dict[str, CaptureKind] = {}
        for statement in self.statements:
            self._collect(statement)

    def find(self, function: FunctionNode) -> list[Match]:
        """Every match in a function, of expressions or of statements as the pattern is, in text order."""
        if self.expression is None:
            return self.find_statements(function)
        matches = []
        for node in expressions(function.body):
            if isinstance(getattr(node, "ctx", None), ast.Load | None):
                if (bound := next(_MATCHING.node(self.expression, node, {}), None)) is not None:
                    matches.append(Match((node,), bound))
        return sorted(matches, key=lambda match: (match.nodes[0].lineno, match.nodes[0].col_offset))

    def find_statements(self, function: FunctionNode, *, nested: bool = True) -> list[Match]:
        """Every run of consecutive statements that the pattern matches, in text order.

        With ``nested=False``, functions and classes defined in ``function`` are not searched.
        """
        matches = []
        size = len(self.statements)
        for block in blocks(function, nested=nested):
            for start in range(len(block) - size + 1):
                run = block[start : start + size]
                if (bound := next(_MATCHING.block(self.statements, run, {}), None)) is not None:
                    matches.append(Match(tuple(run), bound))
        return sorted(matches, key=lambda match: (match.nodes[0].lineno, match.nodes[0].col_offset))

    def require(
        self, document: Document, function: FunctionNode, matches: Sequence[Match], count: int | None
    ) -> None:
        """Check that there are exactly ``count`` matches, or at least one for None, without overlaps.

        Raises:
            PatchTargetError: otherwise, with the number and the lines of the matches.
        """
        lines = [document.lineno(match.span(document)[0]) for match in matches]
        if len(matches) != count and (count is not None or not matches):
            told = f" (line {', '.join(map(str, lines))})" if lines else self._nearly(document, function)
            raise PatchTargetError(
                f"the pattern {self._first_line()!r} has to match "
                f"{'at least once' if count is None else _times(count)} in {self.target}, "
                f"it matches {_times(len(matches))}{told}",
                where=self.where,
                fix="make the pattern describe the installed code"
                + (f", or set matches={len(matches)} if every one of them is meant" if lines else ""),
                target=self.target,
            )
        spans = [match.span(document) for match in matches]
        for (_, end), (start, _) in pairwise(spans):
            if start < end:
                raise PatchTargetError(
                    f"matches of the pattern {self._first_line()!r} overlap in {self.target} "
                    f"(line {', '.join(map(str, lines))})",
                    where=self.where,
                    fix="make the pattern more specific, so that its matches do not overlap",
                    target=self.target,
                )

    def _first_line(self) -> str:
        first, *rest = self.text.splitlines()
        return f"{first} ..." if rest else first

    def _nearly(self, document: Document, function: FunctionNode) -> str:
        # Patch authors need this after an upgrade: how far the pattern still matches.
        best, at = 0, 0
        for block in blocks(function, nested=True):
            for start in range(len(block)):
                bound: Bound = {}
                same = 0
                for pattern, node in zip(self.statements, block[start:], strict=False):
                    if (further := next(_MATCHING.node(pattern, node, bound), None)) is None:
                        break
                    bound = further
                    same += 1
                if same > best:
                    best, at = same, document.lineno(document.start(block[start]))
        if best:
            return f"; only the first {best} of its {len(self.statements)} statements match, at line {at}"
        if isinstance(self.expression, ast.Call):
            callee = serialise(self.expression.func)
            calls = [node for node in expressions(function.body) if isinstance(node, ast.Call)]
            same_callee = sorted({node.lineno for node in calls if serialise(node.func) == callee})
            if same_callee:
                return f"; the callee has other arguments at line {', '.join(map(str, same_callee))}"
        return ""

    def _collect(self, pattern: ast.AST) -> None:
        if isinstance(pattern, ast.Call):
            rests = [*map(_MATCHING.rest, pattern.args), *map(_MATCHING.rest, pattern.keywords)]
            for kind in ("positionals", "keywords"):
                if sum(rest is not None and rest[0] == kind for rest in rests) > 1:
                    raise self._error(
                        f"a call in the pattern captures the remaining {kind} twice", "drop one of them"
                    )
            items: tuple[ast.expr | ast.keyword, ...] = (*pattern.args, *pattern.keywords)
            for item, rest in zip(items, rests, strict=True):
                if rest is None:
                    self._collect(item)
                else:
                    self._add(rest[1], rest[0])
            self._collect(pattern.func)
        elif (name := capture_name(pattern)) is not None:
            self._add(name, "expression")
        else:
            for child in ast.iter_child_nodes(pattern):
                self._collect(child)

    def _add(self, name: str, kind: CaptureKind) -> None:
        if self.captures.setdefault(name, kind) != kind:
            raise self._error(
                f"the pattern captures {name} as {kind} and as {self.captures[name]}",
                "give the two different names",
            )

    def _error(self, what: str, fix: str) -> PatchError:
        return PatchError(what, where=self.where, fix=fix, target=self.target)


def dedented(text: str) -> str:
    """Code as a config quotes it, without its common indentation and the blank lines around it."""
    text = _BLANK_LINES.sub("", text).rstrip()
    try:
        return reindent(text, text[: len(text) - len(text.lstrip(" \t"))], "")
    except (SyntaxError, TokenError):
        return textwrap.dedent(text)  # not valid Python: the parser reports why


def capture_name(node: object) -> str | None:
    """The name in ``{name}``, or None if ``node`` is not a hole."""
    if isinstance(node, ast.Set) and len(node.elts) == 1 and isinstance(node.elts[0], ast.Name):
        return node.elts[0].id
    return None


_MATCHING = Matching(capture_name)


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
