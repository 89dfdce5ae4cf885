"""The guard that lets a kernel stand in for a run of statements.

Where the function goes straight on to its ``return``, the guard returns what the function would, and
upstream's lines stay as they are; elsewhere the run goes to the ``else`` of the guard.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Sequence

from veomni_hook.patches.routes.site import Splice
from veomni_hook.patches.routes.splice import before_statement
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.structure.runs import Run, loaded, put_together, target
from veomni_hook.patches.structure.scope import bound_names
from veomni_hook.patches.text.reindent import string_lines
from veomni_hook.patches.text.walk import walk_ast

__all__ = ["guard"]

# Beyond this a guard would repeat more of upstream than it adds.
_LONGEST_TAIL = 4
_LINES = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")


def guard(
    view: ModuleView,
    run: Run,
    condition: str,
    answer: Sequence[ast.stmt],
    comment: str,
    *,
    returns: bool = True,
    beside: bool = False,
) -> tuple[Splice, ...] | None:
    """The splices that let ``answer`` stand in for the run where ``condition`` holds; None if it cannot.

    Args:
        answer: assigns what the run assigns and others read, or returns.
        returns: whether the guard may return, past what else follows in the function.
        beside: whether what else others read may be computed once more, after the answer; the run computes
            and does nothing else.
    """
    code: Sequence[ast.stmt] | None = answer
    if not isinstance(answer[-1], ast.Return):
        outside = set(loaded(run.function.body, skip=run.statements))
        if beside:
            answer = [*answer, *_beside(run, outside & _lost(run, answer))]
        if outside & _lost(run, answer) or not all(map(view.document.begins_line, run.statements)):
            return None
        code = _to_the_end(run, answer) if returns else None
    head = f"if {condition}:\n"
    if code is None:
        return _with_else(view, run, head + _indented(answer), comment)
    return before_statement(view, run.function, run.statements[0], head + _indented(code), comment)


def _lost(run: Run, answer: Sequence[ast.stmt]) -> set[str]:
    return bound_names(run.statements) - bound_names(answer)


def _beside(run: Run, names: set[str]) -> list[ast.stmt]:
    """The statements of a run that assign ``names``, as far as they do so from values of before it."""
    found = [each for each in run.statements if bound_names([each]) & names]
    bound = bound_names(run.statements)
    for each in found:
        if target(each) is None or bound & set(loaded([each])) - {target(each)} or _calls_module(run, each):
            return []
    targets = [target(each) for each in found]
    # Of two assignments to one name the second is what stays, and what it reads is the first.
    return found if len(set(targets)) == len(names) == len(found) else []


def _calls_module(run: Run, statement: ast.stmt) -> bool:
    calls = (node.func for node in walk_ast(statement) if isinstance(node, ast.Call))
    receiver = run.function.args.args[0].arg
    return any(isinstance(each, ast.Attribute) and receiver in loaded([each.value]) for each in calls)


def _to_the_end(run: Run, answer: Sequence[ast.stmt]) -> list[ast.stmt] | None:
    """The answer and what the function does after the run, shortly."""
    tail = run.tail
    ends = run.block is run.function.body and tail and isinstance(tail[-1], ast.Return)
    if not ends or len(tail) > _LONGEST_TAIL:
        return None
    for number in range(len(answer)):
        value = put_together([*answer[number:], *tail])
        if value is not None:
            return [*answer[:number], ast.Return(value)]
    value = put_together(tail)
    return [*answer, ast.Return(value)] if value is not None else None


def _with_else(view: ModuleView, run: Run, code: str, comment: str) -> tuple[Splice, ...]:
    document = view.document
    splices = before_statement(view, run.function, run.statements[0], f"{code}\nelse:", comment)
    start = splices[0].start
    text = document.source[start : document.end(run.statements[-1])]
    inside = string_lines("if 1:\n" + text)
    place = start
    # Not by `splitlines`, for which a form feed ends a line, too.
    for number, line in enumerate(_LINES.findall(text), start=2):
        if (code := line.lstrip(" \t\f")).strip() and number not in inside:
            # After the indentation: four columns in front of a tab may be none.
            at = place + len(line) - len(code)
            splices += (Splice(at, at, "    "),)
        place += len(line)
    return splices


def _indented(statements: Iterable[ast.stmt]) -> str:
    return "\n".join(f"    {_text(ast.fix_missing_locations(each))}" for each in statements)


def _text(statement: ast.stmt) -> str:
    if (
        isinstance(statement, ast.Return)
        and isinstance(statement.value, ast.Tuple)
        and len(statement.value.elts) > 1
    ):
        return f"return {', '.join(map(ast.unparse, statement.value.elts))}"
    return ast.unparse(statement)
