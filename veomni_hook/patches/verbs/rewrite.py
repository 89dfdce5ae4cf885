"""Rewrites: code inside one upstream function, found by structure and replaced.

``pattern`` and ``replacement`` share their captures. A pattern that is one expression replaces expressions;
any other pattern replaces sequences of statements. Code around the match stays unchanged.
"""

from __future__ import annotations

import ast

from veomni_hook.errors import PatchError
from veomni_hook.patches.code.captures import find_places, substitute
from veomni_hook.patches.code.comparison import means
from veomni_hook.patches.code.document import Document, FunctionNode
from veomni_hook.patches.code.edit import Edit, apply_edits, reindent
from veomni_hook.patches.code.nearest_names import listed
from veomni_hook.patches.code.pattern import Match, Pattern, capture_name, dedented
from veomni_hook.patches.code.scope import bound_names, nested_names, used_names
from veomni_hook.patches.code.tree import swapped, walk_ast
from veomni_hook.patches.plan import Task
from veomni_hook.patches.verbs.inplace import (
    check_body,
    earlier_names,
    effects,
    mark_statement,
    marker,
    refuse_names,
    with_new_names,
)
from veomni_hook.patches.verbs.targets import function_named

__all__ = ["plan_rewrite"]

_ONCE = (ast.Call, ast.Await, ast.Yield, ast.YieldFrom, ast.NamedExpr)
_WRAPPER = "if 1:\n"


def plan_rewrite(task: Task) -> None:
    """Plan the edits that rewrite every match of a patch's pattern.

    Raises:
        PatchTargetError: the target, or a definition that the patch relies on, is missing or has an unknown
            body, or the pattern does not match exactly ``matches`` times.
        PatchError: the replacement is not valid where the pattern matches.
    """
    document, patch = task.document, task.patch
    definition, function = function_named(task, "function", "method")
    check_body(task, definition)
    renames = earlier_names(task, function)
    pattern = Pattern(with_new_names(patch.pattern or "", renames, keywords=True), **task.place)
    replacement = _parse(task, dedented(patch.replacement_text or ""), pattern)
    if renames:
        replacement = Document(with_new_names(replacement.source, renames))
    _check_replacement(task, replacement, function, pattern)
    matches = pattern.find(function)
    pattern.require(document, function, matches, patch.matches)
    if matches:
        start = matches[0].span(document)[0]
        task.add(mark_statement(document, function, start, marker(task, definition)))
    for match in matches:
        _check_captures(task, replacement, match)
        _rewrite(task, function, match, pattern, replacement)


def _parse(task: Task, text: str, pattern: Pattern) -> Document:
    try:
        replacement = Document(text)
    except SyntaxError as error:
        raise task.error(
            PatchError,
            f"the replacement is not valid Python: {error.msg} (its line {error.lineno})",
            "write Python code in which {name} stands for what the pattern captures",
        ) from error
    body = replacement.tree.body
    is_expression = len(body) == 1 and isinstance(body[0], ast.Expr)
    if not body or (pattern.expression is not None and not is_expression):
        wanted = "one expression" if pattern.expression is not None else "statements"
        what = f"the replacement has to be {wanted}, as the pattern is"
        raise task.error(PatchError, what, f"write {wanted}")
    return replacement


def _check_replacement(task: Task, replacement: Document, function: FunctionNode, pattern: Pattern) -> None:
    holes = {name for node in walk_ast(replacement.tree) if (name := capture_name(node)) is not None}
    refuse_names(
        task,
        holes - pattern.captures.keys(),
        f"the replacement uses captures that the pattern does not make ({listed(sorted(pattern.captures))})",
        "capture them in the pattern",
    )
    bound = bound_names([replacement.tree]) if pattern.expression is not None else set()
    refuse_names(
        task,
        bound and bound & used_names([function]),
        f"the replacement binds names that {task.target} uses itself",
        "rename them in the replacement",
    )


def _check_captures(task: Task, replacement: Document, match: Match) -> None:
    captured = [node for capture in match.captures.values() for node in capture.nodes]
    refuse_names(
        task,
        nested_names(replacement.tree) & used_names(captured),
        "the replacement hides names that the captured code uses",
        "rename the variables of its comprehensions, lambdas and functions",
    )
    used = [place.name for place in find_places(replacement.tree, match.captures, holes=True)]
    refuse_names(
        task,
        {name for name in used if used.count(name) > 1 and effects(match.captures[name], _ONCE)},
        "the replacement would run captured calls or assignments more than once",
        "use these captures once in the replacement",
    )


def _rewrite(
    task: Task, function: FunctionNode, match: Match, pattern: Pattern, replacement: Document
) -> None:
    document = task.document
    start, end = match.span(document)
    if pattern.expression is None and not _has_own_lines(document, match):
        raise task.error(
            PatchError,
            f"the statements at line {document.lineno(start)} of {document.module} share a line with others",
            "rewrite an expression, or match the whole statement that they belong to",
        )
    # The inserted code is checked in the context of the whole function, at its final indentation.
    indent = document.indent(match.nodes[0])
    wrapper = _WRAPPER if indent else ""
    code = Document(wrapper + reindent(replacement.source, "", indent)) if indent else replacement
    text = substitute(code, match.captures, document, holes=True, **task.place).removeprefix(wrapper)
    tree = ast.parse(wrapper + text)
    body = tree.body[0].body if indent and isinstance(tree.body[0], ast.If) else tree.body
    first, *others = match.nodes
    new = [body[0].value] if pattern.expression is not None and isinstance(body[0], ast.Expr) else body
    swaps = {id(first): tuple(new)} | {id(node): () for node in others}
    wanted: ast.stmt = swapped(function, swaps)
    text = text[len(indent) :]
    for candidate in (text,) if pattern.expression is None else (text, f"({text})"):
        if _function_means(document, function, Edit(start, end, candidate), wanted):
            task.change(start, end, candidate)
            return
    raise task.error(
        PatchError,
        f"the replacement cannot stand at line {document.lineno(start)} of {document.module}",
        "match the whole expression or statement that it belongs to",
    )


def _function_means(document: Document, function: FunctionNode, edit: Edit, wanted: ast.stmt) -> bool:
    begin, end = document.span(function)
    line = document.line_start(begin)
    moved = Edit(edit.start - line, edit.end - line, edit.text)
    source = apply_edits(document.source[line:end], [moved])
    if not document.indent(function):
        return means(source, ast.Module(body=[wanted], type_ignores=[]))
    around = ast.If(test=ast.Constant(1), body=[wanted], orelse=[])
    return means(_WRAPPER + source, ast.Module(body=[around], type_ignores=[]))


def _has_own_lines(document: Document, match: Match) -> bool:
    end = match.span(document)[1]
    after = document.source[end : document.line_end(end)].strip()
    elif_ = document.source.startswith("elif", document.start(match.nodes[0]))
    return document.begins_line(match.nodes[0]) and not elif_ and (not after or after.startswith("#"))
