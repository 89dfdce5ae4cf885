"""Insert captured upstream code into the code of a guard or a rewrite.

A place is a node of that code, never a piece of text, so strings, comments, attributes and keyword names
do not change. Brackets are added only if the code would mean something else without them. The result is
parsed again and must be the intended tree.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import TypeAlias

from veomni_hook.errors import PatchError
from veomni_hook.patches.code.comparison import means
from veomni_hook.patches.code.document import Document
from veomni_hook.patches.code.edit import Edit, apply_edits
from veomni_hook.patches.code.pattern import Capture, capture_name
from veomni_hook.patches.code.tree import calls_in, swapped, walk_ast

__all__ = ["CapturePlace", "find_places", "substitute"]

_COMMA = re.compile(r"(?:[\s)]|#[^\r\n]*[\r\n])*(,)[ \t]*")
_LINE_LIMIT = 119
_Argument: TypeAlias = ast.expr | ast.keyword


@dataclass(frozen=True, slots=True)
class CapturePlace:
    """A use of a capture: ``node`` is the expression, ``*`` argument or ``**`` keyword that it replaces.

    ``call`` is the call around it if it represents several arguments. ``in_string`` marks a place in an
    f-string, where Python 3.11 does not know the positions of nodes.
    """

    name: str
    node: _Argument
    call: ast.Call | None = None
    in_string: bool = False


def find_places(tree: ast.AST, captures: Mapping[str, Capture], *, holes: bool) -> Iterator[CapturePlace]:
    """Every place in ``tree`` that uses a capture, in the order of the tree.

    Args:
        tree: the guard's or the replacement's code.
        captures: the captures by name.
        holes: True if the code writes a capture as ``{name}``, False if it reads a plain name.
    """
    if isinstance(tree, ast.JoinedStr):
        for inner in walk_ast(tree):
            name = _name(inner, holes=holes)
            if name in captures and isinstance(inner, ast.expr):
                yield CapturePlace(name, inner, in_string=True)
    elif isinstance(tree, ast.Call):
        arguments: tuple[_Argument, ...] = (*tree.args, *tree.keywords)
        for argument in arguments:
            spread = isinstance(argument, ast.Starred | ast.keyword) and not getattr(argument, "arg", None)
            name = _name(getattr(argument, "value", None) if spread else None, holes=holes)
            if name in captures and captures[name].kind != "expression":
                yield CapturePlace(name, argument, tree)
            else:
                yield from find_places(argument, captures, holes=holes)
        yield from find_places(tree.func, captures, holes=holes)
    elif (name := _name(tree, holes=holes)) in captures and isinstance(tree, ast.expr):
        yield CapturePlace(name, tree)
    else:
        for child in ast.iter_child_nodes(tree):
            yield from find_places(child, captures, holes=holes)


def substitute(
    code: Document,
    captures: Mapping[str, Capture],
    upstream: Document,
    *,
    holes: bool,
    where: str,
    target: str,
) -> str:
    """Return ``code``'s text with every use of a capture replaced by the captured source text.

    Args:
        code: the guard's or the replacement's code, as it will be indented.
        captures: the captures by name; their nodes belong to ``upstream``.
        upstream: the module that the captures come from.
        holes: see `find_places`.
        where: the location for error messages.
        target: the patch's target, for error messages.

    Raises:
        PatchError: a capture is not valid where the code uses it.
    """
    places = list(find_places(code.tree, captures, holes=holes))
    empty = frozenset(id(place.node) for place in places if place.call and not captures[place.name].nodes)
    choices = [list(_candidates(code, place, captures[place.name], upstream, empty)) for place in places]
    swaps = {id(place.node): captures[place.name].nodes for place in places}
    tree = swapped(code.tree, swaps)
    # Brackets are rarely needed: try without any before deciding for each place.
    result = apply_edits(code.source, [edit for choice in choices for edit in (choice or [[]])[0]])
    if not means(result, tree):
        edits: list[Edit] = []
        for place, choice in zip(places, choices, strict=True):
            alone = swapped(code.tree, {id(place.node): swaps[id(place.node)]})
            if id(place.node) in empty:
                edits += choice[0]  # adjacent removals are valid only together
                continue
            chosen = next((item for item in choice if means(apply_edits(code.source, item), alone)), None)
            if chosen is None:
                raise _misplaced(code, place, captures[place.name], upstream, where=where, target=target)
            edits += chosen
        result = apply_edits(code.source, edits)
    if not means(result, tree):
        raise PatchError(
            "the inserted code changes its meaning when the captures are put into it",
            where=where,
            fix="give every captured value its own name in the inserted code",
            target=target,
        )
    _refuse_repeated_keywords(result, where=where, target=target)
    return result


def _misplaced(
    code: Document, place: CapturePlace, capture: Capture, upstream: Document, *, where: str, target: str
) -> PatchError:
    line = code.line_start(code.start(place.node))
    used = code.source[line : code.line_end(line)].strip()
    text = ", ".join(upstream.text(node) for node in capture.nodes) or "nothing"
    return PatchError(
        f"the capture {place.name} is not valid in {used!r}: it is {_KINDS[capture.kind]} here ({text})",
        where=where,
        fix=f"use it {_USES[capture.kind].format(place.name)}, or change the pattern",
        target=target,
    )


_KINDS = {
    "expression": "an expression",
    "keywords": "keyword arguments",
    "positionals": "positional arguments",
}
_USES = {
    "expression": "as `{0}` where an expression may stand",
    "keywords": "as `**{0}` in a call",
    "positionals": "as `*{0}` in a call",
}


def _name(node: ast.AST | None, *, holes: bool) -> str:
    if node is None:
        return ""
    if holes:
        return capture_name(node) or ""
    return node.id if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) else ""


def _candidates(
    code: Document, place: CapturePlace, capture: Capture, upstream: Document, empty: frozenset[int]
) -> Iterator[list[Edit]]:
    start, end = code.start(place.node), code.end(place.node)
    texts = [upstream.source[upstream.start(node) : upstream.end(node)] for node in capture.nodes]
    if place.in_string:
        return
    if capture.kind == "expression":
        yield [Edit(start, end, texts[0])]
        yield [Edit(start, end, f"({texts[0]})")]
    elif place.call is None:
        return
    elif texts:
        line = code.line_start(start)
        joined = ", ".join(texts)
        if start - line + len(joined) > _LINE_LIMIT and "\n" not in joined:
            begun = code.source[line:start]
            indent = begun[: len(begun) - len(begun.lstrip())]
            if begun == indent:
                joined = f",\n{indent}".join(texts)
            else:
                # The blank before a removed argument may be removed, too.
                start = start if empty else line + len(begun.rstrip())
                joined = f"\n{indent}    " + f",\n{indent}    ".join(texts)
        yield [Edit(start, end, joined)]
    else:
        yield _removal(code, place.node, place.call, empty)


def _removal(code: Document, argument: _Argument, call: ast.Call, empty: frozenset[int]) -> list[Edit]:
    """Remove an argument from its call together with one comma; ``empty`` holds all removed arguments."""
    arguments: list[_Argument] = sorted([*call.args, *call.keywords], key=code.start)
    index = arguments.index(argument)
    start, end = code.start(argument), code.end(argument)
    # Adjacent removals take the commas of one side, so that no comma is removed twice.
    *_, last = takewhile(lambda other: id(other) in empty, arguments[index:])
    limit = code.end(call) - 1
    after = _COMMA.match(code.source, end, limit)
    if after is not None and _COMMA.match(code.source, code.end(last), limit):
        blank = not code.source[code.line_start(start) : start].strip(" \t")
        if blank and not code.source[after.end() : code.line_end(after.end())].strip(" \t"):
            return [Edit(code.line_start(start), code.next_line(after.end()), "")]
        return [Edit(start, after.end(), "")]
    before = _COMMA.match(code.source, code.end(arguments[index - 1]), limit) if index else None
    if before is None:
        return [Edit(start, end, "")]
    if not code.source[before.end(1) : start].strip():
        return [Edit(before.start(1), end, "")]
    return [Edit(before.start(1), before.end(1), ""), Edit(start, end, "")]


def _refuse_repeated_keywords(text: str, *, where: str, target: str) -> None:
    # The parser accepts a repeated keyword; only compiling the whole module would raise.
    for call in calls_in(ast.parse(text)):
        names = [keyword.arg for keyword in call.keywords if keyword.arg is not None]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise PatchError(
                f"the inserted code passes {', '.join(twice)} twice in one call",
                where=where,
                fix="capture these keywords by name in the pattern, so that the rest does not hold them",
                target=target,
            )
