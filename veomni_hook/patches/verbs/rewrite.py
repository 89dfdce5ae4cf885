"""Rewrites: code inside one upstream function, found by structure and replaced.

``pattern`` and ``replacement`` share their captures. A pattern that is one expression replaces expressions;
any other pattern replaces sequences of statements. Code around the match stays unchanged.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from veomni_hook.errors import PatchError
from veomni_hook.patches.code.captures import find_places, substitute
from veomni_hook.patches.code.comparison import means
from veomni_hook.patches.code.document import Document, FunctionNode
from veomni_hook.patches.code.edit import Edit, apply_edits, reindent
from veomni_hook.patches.code.nearest_names import listed
from veomni_hook.patches.code.pattern import Match, Pattern, capture_name, dedented
from veomni_hook.patches.code.scope import bound_names, nested_names, used_names
from veomni_hook.patches.code.tree import swapped, walk_ast
from veomni_hook.patches.spec import Patch
from veomni_hook.patches.verbs.inplace import (
    check_body,
    earlier_names,
    effects,
    find_function,
    mark_statement,
    marker,
    refuse_names,
    with_new_names,
    with_newlines,
)

__all__ = ["plan_rewrite"]

_ONCE = (ast.Call, ast.Await, ast.Yield, ast.YieldFrom, ast.NamedExpr)
_WRAPPER = "if 1:\n"


def plan_rewrite(
    document: Document, patch: Patch, index: int, *, config: str = "", where: str = ""
) -> list[Edit]:
    """Return the edits that rewrite every match of the patch's pattern.

    Args:
        document: the module to rewrite.
        patch: a patch of type `PatchType.REWRITE`.
        index: the patch's number, which the edits carry.
        config: the config's name, for the marker.
        where: the place that an error names; the target's by default.

    Raises:
        PatchTargetError: the target, or a definition that the patch relies on, is missing or has an unknown
            body, or the pattern does not match exactly ``matches`` times.
        PatchError: the replacement is not valid where the pattern matches.
    """
    where = where or f"{document.module}, {patch.target}"
    definition, function = find_function(document, patch, where)
    check_body(document, definition, patch, where)
    renames = earlier_names(document, patch, function)
    text = with_new_names(patch.pattern or "", renames, keywords=True)
    pattern = Pattern(text, where=where, target=patch.target)
    replacement = _parse(dedented(patch.replacement_text or ""), pattern)
    if renames:
        replacement = Document(with_new_names(replacement.source, renames))
    _check_replacement(replacement, function, pattern)
    found = pattern.find(function)
    pattern.require(document, function, found, patch.matches)
    comment = marker(definition, patch, config)
    edits = [mark_statement(document, function, found[0].span(document)[0], index, comment)] if found else []
    for match in found:
        _check_captures(replacement, function, match, pattern)
        edits.append(_edit(document, function, match, pattern, replacement, index))
    return edits


def _parse(text: str, pattern: Pattern) -> Document:
    try:
        replacement = Document(text)
    except SyntaxError as error:
        raise PatchError(
            f"the replacement is not valid Python: {error.msg} (its line {error.lineno})",
            where=pattern.where,
            fix="write Python code in which {name} stands for what the pattern captures",
            target=pattern.target,
        ) from error
    body = replacement.tree.body
    is_expression = len(body) == 1 and isinstance(body[0], ast.Expr)
    if not body or (pattern.expression is not None and not is_expression):
        wanted = "one expression" if pattern.expression is not None else "statements"
        raise PatchError(
            f"the replacement has to be {wanted}, as the pattern is",
            where=pattern.where,
            fix=f"write {wanted}",
            target=pattern.target,
        )
    return replacement


def _check_replacement(replacement: Document, function: FunctionNode, pattern: Pattern) -> None:
    holes = {name for node in walk_ast(replacement.tree) if (name := capture_name(node)) is not None}
    refuse_names(
        holes - pattern.captures.keys(),
        f"the replacement uses captures that the pattern does not make ({listed(sorted(pattern.captures))})",
        fix="capture them in the pattern",
        where=pattern.where,
        target=pattern.target,
    )
    bound = bound_names([replacement.tree]) if pattern.expression is not None else set()
    if bound:
        refuse_names(
            bound & used_names([function]),
            f"the replacement binds names that {pattern.target} uses itself",
            fix="rename them in the replacement",
            where=pattern.where,
            target=pattern.target,
        )


def _check_captures(replacement: Document, function: FunctionNode, match: Match, pattern: Pattern) -> None:
    captured = [node for capture in match.captures.values() for node in capture.nodes]
    refuse_names(
        nested_names(replacement.tree) & used_names(captured),
        "the replacement hides names that the captured code uses",
        fix="rename the variables of its comprehensions, lambdas and functions",
        where=pattern.where,
        target=pattern.target,
    )
    used = [place.name for place in find_places(replacement.tree, match.captures, holes=True)]
    refuse_names(
        {name for name in used if used.count(name) > 1 and effects(match.captures[name], _ONCE)},
        "the replacement would run captured calls or assignments more than once",
        fix="use these captures once in the replacement",
        where=pattern.where,
        target=pattern.target,
    )


def _edit(
    document: Document,
    function: FunctionNode,
    match: Match,
    pattern: Pattern,
    replacement: Document,
    index: int,
) -> Edit:
    start, end = match.span(document)
    if pattern.expression is None and not _has_own_lines(document, match):
        raise PatchError(
            f"the statements at line {document.lineno(start)} of {document.module} share a line with others",
            where=pattern.where,
            fix="rewrite an expression, or match the whole statement that they belong to",
            target=pattern.target,
        )
    # The inserted code is checked in the context of the whole function, at its final indentation.
    indent = document.indent(match.nodes[0])
    code = Document(_WRAPPER + reindent(replacement.source, "", indent)) if indent else replacement
    text = substitute(
        code, match.captures, document, holes=True, where=pattern.where, target=pattern.target
    ).removeprefix(_WRAPPER if indent else "")
    tree = ast.parse(_WRAPPER + text).body[0] if indent else ast.parse(text)
    body = tree.body if isinstance(tree, ast.If | ast.Module) else []
    first, *others = match.nodes
    new = [body[0].value] if pattern.expression is not None and isinstance(body[0], ast.Expr) else body
    swaps = {id(first): tuple(new)} | {id(node): () for node in others}
    wanted: ast.stmt = swapped(function, swaps)
    for candidate in _candidates(pattern, with_newlines(document, text[len(indent) :])):
        if _function_means(document, function, Edit(start, end, candidate), wanted):
            return Edit(start, end, candidate, index)
    raise PatchError(
        f"the replacement cannot stand at line {document.lineno(start)} of {document.module}",
        where=pattern.where,
        fix="match the whole expression or statement that it belongs to",
        target=pattern.target,
    )


def _candidates(pattern: Pattern, text: str) -> Iterator[str]:
    yield text
    if pattern.expression is not None:
        yield f"({text})"


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
