"""Whether code is the same code: digests of definitions, and code with holes that is compared by structure.

`serialise` defines what "the same code" means in this package, on every Python release that can parse it.
A digest covers what a definition does: its parameters, defaults and statements. Its own name and
decorators, annotations, docstrings, comments and layout do not count, so a release that only changes those
keeps the digest.

`Matching` compares by the same rules; explicit keywords match in any order. A hole in two places is the
same code twice. How a hole is written is up to the caller: `Pattern` has ``{name}``, `Template` a name in
capitals.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Literal, TypeAlias

from veomni_hook.patches.code.document import DefinitionNode, is_docstring
from veomni_hook.patches.code.tree import DEFINITIONS

__all__ = [
    "Bound",
    "Capture",
    "CaptureKind",
    "Matching",
    "expressions",
    "fingerprint",
    "means",
    "serialise",
    "significant_fields",
]

# Ignored: fields that the context determines (ctx, simple), spelling (kind, type_comment) and annotations.
# type_params exists since Python 3.12 and is only for annotations.
_INSIGNIFICANT = frozenset({"annotation", "ctx", "kind", "returns", "simple", "type_comment", "type_params"})


def fingerprint(node: DefinitionNode) -> str:
    """Return the digest of a definition: 16 hexadecimal characters.

    Nested definitions count with their names and decorators. For an assignment only the value counts.
    """
    if isinstance(node, DEFINITIONS):
        ignored = {"name", "decorator_list"}
        fields = [(name, value) for name, value in significant_fields(node) if name not in ignored]
        text = f"{type(node).__name__}({_fields_text(fields)})"
    else:
        text = serialise(node.value)
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def serialise(value: object) -> str:
    """Return a text that is equal for two trees if and only if they are the same code.

    Args:
        value: a node, a list of nodes, or a field's plain value.
    """
    # Names and attributes are two thirds of all nodes; handling them here halves the time of a digest.
    if type(value) is ast.Name:
        return f"Name(id=str:{value.id!a})"
    if type(value) is ast.Attribute:
        return f"Attribute(value={serialise(value.value)},attr=str:{value.attr!a})"
    if isinstance(value, ast.AST):
        kind = "Assign" if isinstance(value, ast.AnnAssign) else type(value).__name__
        return f"{kind}({_fields_text(significant_fields(value))})"
    if isinstance(value, list):
        return f"[{','.join([serialise(item) for item in value])}]"
    # ascii(), because repr() escapes by the Unicode tables of the running Python.
    return f"{type(value).__name__}:{value!a}"


def significant_fields(node: ast.AST) -> Iterator[tuple[str, Any]]:
    """Yield the fields of ``node`` that determine what it does, without empty ones.

    An annotated assignment has the fields of a plain one. Bare annotations (``x: int``) and docstrings are
    removed from the body that contains them. Adjacent literal parts of an f-string are merged.
    """
    if isinstance(node, ast.AnnAssign):
        yield "targets", [node.target]
        if node.value is not None:
            yield "value", node.value
        return
    for name in node._fields:
        if name in _INSIGNIFICANT or (value := getattr(node, name, None)) is None:
            continue
        if isinstance(value, list):
            value = _significant_items(node, name, value)
            if not value:
                continue
        elif name == "format_spec" and not _merge_literals(value.values):
            continue  # f"{x:}"
        yield name, value


def means(text: str, tree: ast.AST) -> bool:
    """Whether ``text`` parses to the same code as the module ``tree``."""
    try:
        return serialise(ast.parse(text)) == serialise(tree)
    except SyntaxError:
        return False


def _fields_text(fields: Any) -> str:
    return ",".join([f"{name}={serialise(value)}" for name, value in fields])


def _significant_items(node: ast.AST, name: str, items: list[Any]) -> list[Any]:
    if name == "body":
        items = [item for item in items if not (isinstance(item, ast.AnnAssign) and item.value is None)]
        if isinstance(node, DEFINITIONS) and items and is_docstring(items[0]):
            items = items[1:]
    elif isinstance(node, ast.JoinedStr):
        items = _merge_literals(items)
    return items


def _merge_literals(parts: list[ast.expr]) -> list[ast.expr]:
    # Python releases split the literal text of f"{x=}" and of joined strings at different positions.
    merged: list[ast.expr] = []
    for part in parts:
        last = merged[-1] if merged else None
        if not (isinstance(part, ast.Constant) and isinstance(part.value, str)):
            merged.append(part)
        elif isinstance(last, ast.Constant) and isinstance(last.value, str):
            merged[-1] = ast.Constant(last.value + part.value)
        elif part.value:
            merged.append(part)
    return merged


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
            filling = _filling(pattern, node)
            return iter(()) if filling is None else _bind(name, Capture("expression", (filling,)), bound)
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

    def _each(self, patterns: Sequence[object], nodes: Sequence[object], bound: Bound) -> Iterator[Bound]:
        if len(patterns) != len(nodes):
            return
        if not patterns:
            yield bound
            return
        pattern, node = patterns[0], nodes[0]
        if not (isinstance(pattern, list) and isinstance(node, list)):
            ways = self.node(pattern, node, bound)
        elif isinstance(pattern[0], ast.stmt):
            ways = self.block(pattern, node, bound)
        else:
            ways = self._each(pattern, node, bound)
        for first in ways:
            yield from self._each(patterns[1:], nodes[1:], first)

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
