"""Guards: statements inserted before upstream code, which stays in the file and runs if they do not return.

A guard cannot change the code that follows it: it may read the function's parameters and the captures of its
``before`` pattern, and every name that it binds must be new.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import replace

from veomni_hook.errors import PatchError
from veomni_hook.patches.code.captures import find_places, substitute
from veomni_hook.patches.code.comparison import fingerprint
from veomni_hook.patches.code.document import Definition, Document, FunctionNode
from veomni_hook.patches.code.edit import Edit, Place, at_start, before, reindent
from veomni_hook.patches.code.nearest_names import listed
from veomni_hook.patches.code.pattern import Capture, CaptureKind, Match, Pattern
from veomni_hook.patches.code.scope import bound_names, local_names, parameter_names, used_names
from veomni_hook.patches.code.snippet import function_body
from veomni_hook.patches.code.tree import walk_ast
from veomni_hook.patches.spec import Patch
from veomni_hook.patches.verbs.inplace import (
    check_body,
    earlier_names,
    effects,
    find_function,
    marker,
    refuse_names,
    with_new_names,
    with_newlines,
)

__all__ = ["plan_guard"]

_ONCE = (ast.Await, ast.Yield, ast.YieldFrom, ast.NamedExpr)
# The wrapper allows an indented block to be parsed; its length is the line offset of the block.
_WRAPPER = "if 1:\n"


def plan_guard(
    document: Document, patch: Patch, index: int, *, config: str = "", where: str = ""
) -> list[Edit]:
    """Return the edits that insert a guard.

    Args:
        document: the module that the guard goes into.
        patch: a patch of type `PatchType.GUARD`.
        index: the patch's number, which the edits carry.
        config: the config's name, for the marker.
        where: the place that an error names; the target's by default.

    Raises:
        PatchTargetError: the target, or a definition that the guard relies on, is missing or differs from the
            code that the guard was written for, or ``before`` does not match exactly ``matches`` times.
        PatchError: the guard is not valid there (see the module's docstring).
    """
    where = where or f"{document.module}, {patch.target}"
    definition, function = find_function(document, patch, where)
    if not patch.fingerprints and patch.before is None:
        raise _no_fingerprint(document, definition, patch, where)
    check_body(document, definition, patch, where)
    renames = earlier_names(document, patch, function)
    before = None if patch.before is None else with_new_names(patch.before, renames, keywords=True)
    pattern = None if before is None else Pattern(before, where=where, target=patch.target)
    parameters, body = function_body(patch.replacement, where=where, target=patch.target)
    # The guard's own code goes on with the names that it was written with.
    old = [name for name in parameters if name in renames]
    body = "".join(f"{name} = {renames[name].new}\n" for name in old) + body
    parameters = tuple(renames[name].new if name in old else name for name in parameters)
    _check_names(parameters, body, function, pattern, patch.target, where)
    edits: list[Edit] = []
    for number, (place, captures) in enumerate(_places(document, function, patch, pattern)):
        edits += [replace(split, patch=index) for split in place.splits]
        block = _block(document, body, place.indent, captures, parameters, where, patch.target)
        if not number:
            comment = with_newlines(document, place.comment(marker(definition, patch, config)))
            edits.append(Edit(place.start, place.start, comment, index, marker=True))
        edits.append(Edit(place.start, place.end, with_newlines(document, place.block(block)), index))
    return edits


def _no_fingerprint(document: Document, definition: Definition, patch: Patch, where: str) -> PatchError:
    digest = fingerprint(definition.node)
    return PatchError(
        f"the guard of {patch.target} does not say which upstream code it was written for; "
        f"in {document.module} its fingerprint is {digest}",
        where=where,
        fix=f"read that code and write fingerprints=[{digest!r}]",
        target=patch.target,
    )


def _check_names(
    parameters: tuple[str, ...],
    body: str,
    function: FunctionNode,
    pattern: Pattern | None,
    target: str,
    where: str,
) -> None:
    tree = ast.parse(body)
    captures: dict[str, CaptureKind] = pattern.captures if pattern is not None else {}
    refuse = {"where": where, "target": target}
    if not tree.body:
        raise PatchError(
            "the guard has no statements", fix="give the function a body besides its docstring", **refuse
        )
    given = parameter_names(function)
    refuse_names(
        set(parameters) - given - captures.keys(),
        f"the guard has parameters that are neither parameters of {target} ({listed(sorted(given))}) "
        f"nor captures of `before` ({listed(sorted(captures))})",
        fix="rename them, or capture what they stand for",
        **refuse,
    )
    refuse_names(
        set(parameters) & given & captures.keys(),
        f"the guard's parameters could mean a parameter of {target} and a capture",
        fix="rename the captures",
        **refuse,
    )
    bound = bound_names(tree.body)
    refuse_names(
        bound & captures.keys() & set(parameters),
        "the guard assigns or shadows captured names",
        fix="use names of the guard's own for its values",
        **refuse,
    )
    refuse_names(
        bound & used_names([function]),
        f"the guard binds names that {target} uses itself",
        fix="rename the guard's own names, for instance with a leading underscore",
        **refuse,
    )
    hidden = (used_names(tree.body) - bound) & local_names(function) - set(parameters)
    refuse_names(
        hidden,
        f"the guard uses local names of {target} that are not among its own parameters",
        fix="make parameters of those that are parameters there, and capture the others in `before`",
        **refuse,
    )
    _check_statements(tree, function, refuse)


def _check_statements(tree: ast.Module, function: FunctionNode, refuse: dict[str, str]) -> None:
    for node in walk_ast(tree):
        forbidden = isinstance(node, ast.Yield | ast.YieldFrom | ast.Global | ast.Nonlocal)
        waits = isinstance(node, ast.Await | ast.AsyncFor | ast.AsyncWith)
        if forbidden or (waits and not isinstance(function, ast.AsyncFunctionDef)):
            raise PatchError(
                f"a guard of {refuse['target']} cannot hold {type(node).__name__.lower()}",
                fix="move that into a helper, or replace the whole function",
                **refuse,
            )


def _places(
    document: Document, function: FunctionNode, patch: Patch, pattern: Pattern | None
) -> list[tuple[Place, Mapping[str, Capture]]]:
    """The places for the guard, each with the captures of ``before`` there."""
    if pattern is None:
        return [(at_start(document, function), {})]
    found = pattern.find_statements(function, nested=False)
    pattern.require(document, function, found, patch.matches)
    return [(_place_before(document, function, match, pattern), match.captures) for match in found]


def _place_before(document: Document, function: FunctionNode, match: Match, pattern: Pattern) -> Place:
    first = match.nodes[0]
    place = before(document, function, first) if isinstance(first, ast.stmt) else None
    if place is None:
        line = document.lineno(document.span(first)[0])
        raise PatchError(
            f"no statement can be put before line {line} of {document.module}: "
            "it begins in the middle of a line or of an if",
            where=pattern.where,
            fix="match the whole statement that it belongs to",
            target=pattern.target,
        )
    return place


def _block(
    document: Document,
    body: str,
    indent: str,
    captured: Mapping[str, Capture],
    parameters: tuple[str, ...],
    where: str,
    target: str,
) -> str:
    """The guard's statements, indented, with captures substituted; no newline at the end."""
    code = Document(_WRAPPER + reindent(body, "", indent))
    captures = {name: capture for name, capture in captured.items() if name in parameters}
    for place in find_places(code.tree, captures, holes=False):
        if effects(captures[place.name], _ONCE):
            raise PatchError(
                f"the capture {place.name} waits, yields or assigns, so it cannot run twice",
                where=where,
                fix="match more of the statement, so that the capture is a plain value",
                target=target,
            )
    return substitute(code, captures, document, holes=False, where=where, target=target)[len(_WRAPPER) :]
