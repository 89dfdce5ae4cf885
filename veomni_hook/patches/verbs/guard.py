"""Guards: statements inserted before upstream code, which stays in the file and runs if they do not return.

A guard cannot change the code that follows it: it may read the function's parameters and the captures of its
``before`` pattern, and every name that it binds must be new.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping

from veomni_hook.errors import PatchError
from veomni_hook.patches.code.captures import find_places, substitute
from veomni_hook.patches.code.comparison import fingerprint
from veomni_hook.patches.code.document import Document, FunctionNode
from veomni_hook.patches.code.edit import Place, at_start, before, reindent
from veomni_hook.patches.code.nearest_names import listed
from veomni_hook.patches.code.pattern import Capture, CaptureKind, Pattern
from veomni_hook.patches.code.scope import bound_names, local_names, parameter_names, used_names
from veomni_hook.patches.code.snippet import function_body
from veomni_hook.patches.code.tree import walk_ast
from veomni_hook.patches.plan import Task
from veomni_hook.patches.verbs.inplace import (
    check_body,
    earlier_names,
    effects,
    marker,
    refuse_names,
    with_new_names,
)
from veomni_hook.patches.verbs.targets import function_named

__all__ = ["plan_guard"]

_ONCE = (ast.Await, ast.Yield, ast.YieldFrom, ast.NamedExpr)
# The wrapper allows an indented block to be parsed; its length is the line offset of the block.
_WRAPPER = "if 1:\n"


def plan_guard(task: Task) -> None:
    """Plan the edits that insert a guard.

    Raises:
        PatchTargetError: the target, or a definition that the guard relies on, is missing or differs from the
            code that the guard was written for, or ``before`` does not match exactly ``matches`` times.
        PatchError: the guard is not valid there (see the module's docstring).
    """
    document, patch = task.document, task.patch
    definition, function = function_named(task, "function", "method")
    if not patch.fingerprints and patch.before is None:
        digest = fingerprint(definition.node)
        raise task.error(
            PatchError,
            f"the guard of {patch.target} does not say which upstream code it was written for; "
            f"in {document.module} its fingerprint is {digest}",
            f"read that code and write fingerprints=[{digest!r}]",
        )
    check_body(task, definition)
    renames = earlier_names(task, function)
    before = None if patch.before is None else with_new_names(patch.before, renames, keywords=True)
    pattern = None if before is None else Pattern(before, **task.place)
    parameters, body = function_body(patch.replacement, **task.place)
    # The guard's own code goes on with the names that it was written with.
    old = [name for name in parameters if name in renames]
    body = "".join(f"{name} = {renames[name].new}\n" for name in old) + body
    parameters = tuple(renames[name].new if name in old else name for name in parameters)
    _check_names(task, set(parameters), ast.parse(body), function, pattern.captures if pattern else {})
    for number, (place, captures) in enumerate(_places(task, function, pattern)):
        task.add(*place.splits)
        used = {name: capture for name, capture in captures.items() if name in parameters}
        block = _block(task, body, place.indent, used)
        if not number:
            task.mark(place.start, place.comment(marker(task, definition)))
        task.change(place.start, place.end, place.block(block))


def _check_names(
    task: Task,
    parameters: set[str],
    tree: ast.Module,
    function: FunctionNode,
    captures: Mapping[str, CaptureKind],
) -> None:
    if not tree.body:
        what = "the guard has no statements"
        raise task.error(PatchError, what, "give the function a body besides its docstring")
    own_parameters, bound, used = parameter_names(function), bound_names(tree.body), used_names([function])
    for names, what, fix in (
        (
            parameters - own_parameters - captures.keys(),
            f"the guard has parameters that are neither parameters of {task.target} "
            f"({listed(sorted(own_parameters))}) nor captures of `before` ({listed(sorted(captures))})",
            "rename them, or capture what they stand for",
        ),
        (
            parameters & own_parameters & captures.keys(),
            f"the guard's parameters could mean a parameter of {task.target} and a capture",
            "rename the captures",
        ),
        (
            bound & captures.keys() & parameters,
            "the guard assigns or shadows captured names",
            "use names of the guard's own for its values",
        ),
        (
            bound & used,
            f"the guard binds names that {task.target} uses itself",
            "rename the guard's own names, for instance with a leading underscore",
        ),
        (
            (used_names(tree.body) - bound) & local_names(function) - parameters,
            f"the guard uses local names of {task.target} that are not among its own parameters",
            "make parameters of those that are parameters there, and capture the others in `before`",
        ),
    ):
        refuse_names(task, names, what, fix)
    for node in walk_ast(tree):
        forbidden = isinstance(node, ast.Yield | ast.YieldFrom | ast.Global | ast.Nonlocal)
        waits = isinstance(node, ast.Await | ast.AsyncFor | ast.AsyncWith)
        if forbidden or (waits and not isinstance(function, ast.AsyncFunctionDef)):
            raise task.error(
                PatchError,
                f"a guard of {task.target} cannot hold {type(node).__name__.lower()}",
                "move that into a helper, or replace the whole function",
            )


def _places(
    task: Task, function: FunctionNode, pattern: Pattern | None
) -> list[tuple[Place, Mapping[str, Capture]]]:
    """The places for the guard, each with the captures of ``before`` there."""
    document = task.document
    if pattern is None:
        return [(at_start(document, function), {})]
    matches = pattern.find_statements(function, nested=False)
    pattern.require(document, function, matches, task.patch.matches)
    places: list[tuple[Place, Mapping[str, Capture]]] = []
    for match in matches:
        first = match.nodes[0]
        place = before(document, function, first) if isinstance(first, ast.stmt) else None
        if place is None:
            line = document.lineno(document.span(first)[0])
            raise task.error(
                PatchError,
                f"no statement can be put before line {line} of {document.module}: "
                "it begins in the middle of a line or of an if",
                "match the whole statement that it belongs to",
            )
        places.append((place, match.captures))
    return places


def _block(task: Task, body: str, indent: str, captures: Mapping[str, Capture]) -> str:
    """The guard's statements, indented, with captures substituted; no newline at the end."""
    code = Document(_WRAPPER + reindent(body, "", indent))
    for place in find_places(code.tree, captures, holes=False):
        if effects(captures[place.name], _ONCE):
            raise task.error(
                PatchError,
                f"the capture {place.name} waits, yields or assigns, so it cannot run twice",
                "match more of the statement, so that the capture is a plain value",
            )
    return substitute(code, captures, task.document, holes=False, **task.place)[len(_WRAPPER) :]
