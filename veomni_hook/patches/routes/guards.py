"""The code that idioms write into upstream's text: statements, expressions, questions to slots, guards.

Code is passed without indentation and gets that of its place; upstream's comments stay above it. A guard
lets a kernel replace a run of statements. If the function's ``return`` follows directly, it returns the
function's result. Otherwise the run moves to the ``else`` of the guard, in a copy of the method
(`veomni_hook.patches.routes.compose`).
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.edit import FUSED, Edit, Place, at_start, before, marker_comment, reindent
from veomni_hook.patches.code.scope import bound_names, defaults, free_name, loaded
from veomni_hook.patches.code.statement_runs import Run, put_together, simple_target
from veomni_hook.patches.code.tree import calls_in, without_annotations
from veomni_hook.patches.routes.compose import method_at
from veomni_hook.patches.routes.view import ModuleView

__all__ = [
    "after_body",
    "as_lambda",
    "ask",
    "before_body",
    "before_statement",
    "decorate",
    "guard",
    "in_place",
    "parameters_as",
    "tuple_of",
]

# Expressions that never need brackets, wherever they are inserted.
_ATOMS = (ast.Attribute, ast.Call, ast.Constant, ast.Dict, ast.List, ast.Name, ast.Set, ast.Subscript)


def before_body(view: ModuleView, function: FunctionNode, code: str, comment: str) -> tuple[Edit, ...]:
    """Insert statements before a function's body, after its docstring.

    A body on the same line as its ``def`` is moved to its own lines.
    """
    return _inserted(at_start(view.document, function), code, comment)


def after_body(view: ModuleView, function: FunctionNode, code: str, comment: str) -> tuple[Edit, ...]:
    """Insert statements at the end of a function's body; they run only if control reaches the end.

    Raises:
        ValueError: the last statement does not begin its own line.
    """
    document, last = view.document, function.body[-1]
    if not document.begins_line(last):
        raise ValueError(f"line {last.lineno} does not begin with the statement")
    at = document.next_line(document.end(last))
    return _inserted(Place(at, at, document.indent(last)), code, comment)


def before_statement(
    view: ModuleView, function: FunctionNode, statement: ast.stmt, code: str, comment: str
) -> tuple[Edit, ...]:
    """Insert statements before a statement of ``function``, above the comments directly above it.

    Raises:
        ValueError: the statement does not begin its own line.
    """
    place = before(view.document, function, statement)
    if place is None:
        raise ValueError(f"line {statement.lineno} does not begin with the statement")
    return _inserted(place, code, comment)


def in_place(view: ModuleView, node: ast.expr, text: str) -> Edit:
    """Replace an expression with another, in brackets if precedence requires them.

    Raises:
        SyntaxError: ``text`` is not an expression.
    """
    expression = ast.parse(text.strip(), mode="eval").body
    bracketed = (expression.lineno, expression.col_offset) != (
        1,
        0,
    )  # a node begins after the brackets around it
    if not bracketed and not isinstance(expression, _ATOMS):
        text = f"({text.strip()})"
    return Edit(view.document.start(node), view.document.end(node), text)


def decorate(view: ModuleView, owner: ast.ClassDef, text: str, comment: str) -> tuple[Edit, ...]:
    """Insert a decorator above all others of a class; ``text`` is the expression, without ``@``.

    Raises:
        ValueError: the class does not begin a line.
    """
    document = view.document
    if not document.begins_line(owner):
        raise ValueError(f"line {owner.lineno} does not begin with the class")
    line = document.line_start(document.span(owner)[0])
    return _inserted(Place(line, line, document.indent(owner)), f"@{text}", comment)


def _inserted(place: Place, code: str, comment: str) -> tuple[Edit, ...]:
    block = place.block(reindent(code.strip("\n"), "", place.indent))
    return (
        *place.splits,
        Edit(place.start, place.start, place.comment(marker_comment("ROUTED", comment)), marker=True),
        Edit(place.start, place.end, block),
    )


_LINE = 80


def ask(
    function: FunctionNode, slot: str, receiver: str, operands: Sequence[str], tests: Sequence[str] = ()
) -> str:
    """Statements that return a kernel's result, if the slot has a kernel; without indentation.

    Args:
        function: the function that gets the statements.
        slot: the slot's name.
        receiver: the function's name for its module.
        operands: the arguments for the slot and the kernel, as source text.
        tests: preconditions; operands are evaluated only if all of them hold.
    """
    kernel, arguments = free_name(function, "kernel"), free_name(function, "operands")
    lines = [
        f"{arguments} = {tuple_of(operands)}",
        f"if ({kernel} := {slot}.kernel({receiver}, *{arguments})) is not None:",
        f"    return {kernel}(*{arguments})",
    ]
    code = "\n".join(lines)
    if not tests:
        return code
    said = [f"({test})" if len(tests) > 1 and " or " in test else test for test in tests]
    indented = "\n".join(f"    {line}" for line in code.splitlines())
    return f"if {' and '.join(said)}:\n{indented}"


def tuple_of(values: Sequence[str]) -> str:
    """A tuple, on one line if it is short."""
    text = f"({', '.join(values)}{',' if len(values) == 1 else ''})"
    return text if len(text) <= _LINE else "(\n" + "".join(f"    {value},\n" for value in values) + ")"


def as_lambda(function: FunctionNode, values: Sequence[str]) -> str:
    """A lambda with the parameters of a function and a tuple of ``values``, which are code, as its result."""
    arguments = without_annotations(function.args)
    body = ast.Tuple([ast.parse(value, mode="eval").body for value in values], ast.Load())
    return ast.unparse(ast.fix_missing_locations(ast.Lambda(arguments, body)))


def parameters_as(
    function: FunctionNode, operands: Mapping[str, str], fixed: Mapping[str, object] | None = None
) -> str | None:
    """A function's parameters as a slot takes them, with the kernel's names: ``query->q, cos, dim=1``.

    Args:
        function: upstream's function.
        operands: names of its parameters to names of the kernel's operands.
        fixed: operands without a parameter, with their values.

    Returns:
        None if it does not define every operand: a default is not a literal, an operand has no parameter, or
        another parameter has the name of an operand.
    """
    fixed = fixed or {}
    spec, known = function.args, defaults(function)
    literal = all(default is None or _is_literal(default) for default in known.values())
    taken = {*operands.values(), *fixed}
    if not literal or not operands.keys() <= known.keys() or (known.keys() - operands.keys()) & taken:
        return None
    said = {name: _said(name, default, operands) for name, default in known.items()}
    parts = [said[parameter.arg] for parameter in (*spec.posonlyargs, *spec.args)]
    if spec.posonlyargs:
        parts.insert(len(spec.posonlyargs), "/")
    named = [said[parameter.arg] for parameter in spec.kwonlyargs]
    named += (f"{operand}={value!r}" for operand, value in fixed.items())
    if spec.vararg is not None or named:
        parts.append(f"*{spec.vararg.arg if spec.vararg is not None else ''}")
    parts += named
    if spec.kwarg is not None:
        parts.append(f"**{spec.kwarg.arg}")
    return ", ".join(parts)


def _said(name: str, default: ast.expr | None, operands: Mapping[str, str]) -> str:
    text = name if operands.get(name, name) == name else f"{name}->{operands[name]}"
    return text if default is None else f"{text}={ast.unparse(default)}"


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except ValueError:
        return False
    return True


# Above this limit a guard would repeat more upstream code than it adds.
_LONGEST_TAIL = 4


def guard(  # noqa: PLR0913 - all but the first five by keyword
    view: ModuleView,
    run: Run,
    slot: str,
    asked: Sequence[str],
    answer: Sequence[ast.stmt],
    comment: str,
    *,
    tests: Iterable[str] = (),
    returns: bool = True,
    beside: bool = False,
    before: str = "",
) -> tuple[Edit, ...] | None:
    """The edits that let ``answer`` replace the run if a slot has a kernel; None if impossible.

    Args:
        slot: the slot's name. What it returns has the function's free name for ``kernel``.
        asked: the arguments for the slot, as source text; empty: only ``tests`` decide.
        answer: assigns what the run assigns and later code reads, or returns.
        tests: conditions in front of the question.
        returns: whether the guard may return, skipping the rest of the function.
        beside: whether other values that later code reads may be recomputed after the answer; the run must
            be free of side effects.
        before: statements in front of the condition.
    """
    code: Sequence[ast.stmt] | None = answer
    if not isinstance(answer[-1], ast.Return):
        outside = set(loaded(run.function.body, skip=run.statements))
        if beside:
            answer = [*answer, *_beside(run, outside & _lost(run, answer))]
        if outside & _lost(run, answer) or not all(map(view.document.begins_line, run.statements)):
            return None
        code = _to_the_end(run, answer) if returns else None
    kernel = free_name(run.function, "kernel")
    asks = [f"({kernel} := {slot}.kernel({', '.join(asked)})) is not None"] if asked else []
    head = f"{before}if {' and '.join([*tests, *asks])}:\n"
    if code is None and method_at(view.document, view.document.start(run.statements[0])) is None:
        return None
    if code is None:
        head += f"{_indented(answer)}\nelse:"
        edits = before_statement(view, run.function, run.statements[0], head, comment)
        indented = Edit(edits[0].start, view.document.end(run.statements[-1]), "    ")
        fuses = f"{slot}.fuses({run.function.args.args[0].arg})"
        return (*(replace(edit, form=FUSED) for edit in edits), replace(indented, fuses=fuses))
    return before_statement(view, run.function, run.statements[0], head + _indented(code), comment)


def _lost(run: Run, answer: Sequence[ast.stmt]) -> set[str]:
    return bound_names(run.statements) - bound_names(answer)


def _beside(run: Run, names: set[str]) -> list[ast.stmt]:
    """The statements of a run that assign ``names``, if they depend only on values from before the run."""
    statements = [statement for statement in run.statements if bound_names([statement]) & names]
    bound, receiver = bound_names(run.statements), run.function.args.args[0].arg
    for assignment in statements:
        name = simple_target(assignment)
        needed = bound & set(loaded([assignment])) - {name}
        methods = [call.func for call in calls_in(assignment) if isinstance(call.func, ast.Attribute)]
        calls_module = any(receiver in loaded([method.value]) for method in methods)
        if name is None or needed or calls_module:
            return []
    targets = [simple_target(statement) for statement in statements]
    # With two assignments to one name, the second one counts, but it may read the first.
    return statements if len(set(targets)) == len(names) == len(statements) else []


def _to_the_end(run: Run, answer: Sequence[ast.stmt]) -> list[ast.stmt] | None:
    """The answer and the rest of the function after the run, if that is short."""
    tail = run.block[run.last + 1 :]
    ends = run.block is run.function.body and tail and isinstance(tail[-1], ast.Return)
    if not ends or len(tail) > _LONGEST_TAIL:
        return None
    for number in range(len(answer)):
        value = put_together([*answer[number:], *tail])
        if value is not None:
            return [*answer[:number], ast.Return(value)]
    value = put_together(tail)
    return [*answer, ast.Return(value)] if value is not None else None


def _indented(statements: Iterable[ast.stmt]) -> str:
    lines = []
    for statement in map(ast.fix_missing_locations, statements):
        value = statement.value if isinstance(statement, ast.Return) else None
        if isinstance(value, ast.Tuple) and len(value.elts) > 1:
            lines.append(f"    return {', '.join(map(ast.unparse, value.elts))}")
        else:
            lines.append(f"    {ast.unparse(statement)}")
    return "\n".join(lines)
