"""Small changes of statements: dropped, doubled, exchanged, added; branches and loops; decorators, parameters."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import partial

from tests.proof.expression_changes import Change, Surroundings

#: Statements that may come after one that binds ``{}``; ``{other}`` is another local.
_INSERTED = (
    ("detach inserted", "{} = {}.detach()"),
    ("value changed later", "{} = {} * 2"),
    ("value changed later", "{} = {} + 0.5"),
    ("value changed later", "{} = {}.float()"),
    ("value changed in place", "{}.mul_(2)"),
    ("value changed in place", "{}[..., 0] = 0"),
    ("gradient changed", "{}.register_hook(lambda gradient: gradient * 2)"),
    ("second use", "{} = {} + {other}.float().mean()"),
    ("second use", "{other} = {other} + {}.float().mean().to({other}.dtype)"),
    ("second use", "{} = {other}"),
    ("second use", "if {other} is not None:\n    {} = {} * 3"),
    ("second use", "if self.training:\n    {} = {} * 3"),
    ("second use", "if not self.training:\n    {} = {} * 3"),
    ("early return", "return {}"),
)
_ITERATED = ("reversed(list({}))", "list({})[1:]", "list({})[:-1]", "list({})[::2]", "list({})[:1]")


def of_statements(function: ast.FunctionDef, around: Surroundings) -> Iterator[Change]:
    """What may be changed about the statements of a function, nested ones also."""
    for block in _blocks(function):
        for index, statement in enumerate(block):
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                continue
            yield from _in_block(block, index, statement)
            yield from _of_one(block, index, statement)
            yield from _after(block, index, statement, around)


def _blocks(function: ast.FunctionDef) -> Iterator[list[ast.stmt]]:
    for node in ast.walk(function):
        for field in ("body", "orelse"):
            block = getattr(node, field, None)
            if isinstance(block, list) and block:
                yield block


def _set(node: ast.AST, field: str, value: object) -> None:
    setattr(node, field, value)


def _replace(block: list[ast.stmt], index: int, made: list[ast.stmt]) -> None:
    block[index : index + 1] = made


def _in_block(block: list[ast.stmt], index: int, statement: ast.stmt) -> Iterator[Change]:
    def drop() -> None:
        _replace(block, index, [] if len(block) > 1 else [ast.Pass()])

    yield "statement dropped", "statement dropped", statement.lineno, drop
    yield (
        "statement repeated",
        "statement repeated",
        statement.lineno,
        lambda: _replace(block, index, [statement, statement]),
    )
    quiet = ast.With(
        [ast.withitem(ast.parse("torch.no_grad()", mode="eval").body, None)], [statement], lineno=0
    )
    if not isinstance(statement, ast.Return):
        yield "no_grad", "under no_grad", statement.lineno, lambda: _replace(block, index, [quiet])
    if index + 1 < len(block):
        yield (
            "statements swapped",
            "statement after the next",
            statement.lineno,
            lambda: block.insert(index, block.pop(index + 1)),
        )


def _of_one(block: list[ast.stmt], index: int, statement: ast.stmt) -> Iterator[Change]:
    if isinstance(statement, ast.Assign | ast.AugAssign):
        yield from _of_assignment(block, index, statement)
    if isinstance(statement, ast.If):
        yield from _of_branch(block, index, statement)
    if isinstance(statement, ast.For):
        yield from _of_loop(statement)
    if isinstance(statement, ast.Return) and statement.value is not None:
        if not isinstance(statement.value, ast.Tuple):
            for method in ("float", "detach"):
                cast = ast.Call(ast.Attribute(statement.value, method, ast.Load()), [], [])
                yield (
                    "result",
                    f"result .{method}()",
                    statement.lineno,
                    partial(_set, statement, "value", cast),
                )


def _of_assignment(
    block: list[ast.stmt], index: int, statement: ast.Assign | ast.AugAssign
) -> Iterator[Change]:
    line = statement.lineno
    if isinstance(statement, ast.AugAssign):
        plain = ast.Assign([statement.target], statement.value, lineno=line)
        yield "augmented", "augmented to plain", line, partial(_replace, block, index, [plain])
        other = ast.Sub() if isinstance(statement.op, ast.Add) else ast.Add()
        yield "augmented", "other augmented", line, partial(_set, statement, "op", other)
    elif isinstance(target := statement.targets[0], ast.Name | ast.Subscript):
        for operator in (ast.Add(), ast.Mult()):
            more = ast.AugAssign(target, operator, statement.value, lineno=line)
            yield "augmented", "plain to augmented", line, partial(_replace, block, index, [more])


def _of_branch(block: list[ast.stmt], index: int, statement: ast.If) -> Iterator[Change]:
    line = statement.lineno
    turned = ast.UnaryOp(ast.Not(), statement.test)
    yield "branch", "test negated", line, partial(_set, statement, "test", turned)
    yield "branch", "always taken", line, partial(_replace, block, index, statement.body)
    yield "branch", "never taken", line, partial(_replace, block, index, statement.orelse or [ast.Pass()])
    if statement.orelse:
        yield "branch", "else dropped", line, partial(_set, statement, "orelse", [])


def _of_loop(statement: ast.For) -> Iterator[Change]:
    for template in _ITERATED:
        text = template.format(ast.unparse(statement.iter))
        made = ast.parse(text, mode="eval").body
        yield "loop", f"over {text}", statement.lineno, partial(_set, statement, "iter", made)
    yield "loop", "one turn only", statement.lineno, lambda: statement.body.append(ast.Break())


def _after(block: list[ast.stmt], index: int, statement: ast.stmt, around: Surroundings) -> Iterator[Change]:
    bound = sorted(
        {n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        | set(around.draw.sample(list(around.names), min(1, len(around.names))))
    )
    if isinstance(statement, ast.Return) or not bound:
        return
    kind, template = around.draw.choice(_INSERTED)
    name = around.draw.choice(bound)
    other = around.other(around.names, name)
    if other is None and "{other}" in template:
        return
    text = template.format(*[name] * template.count("{}"), other=other)
    made = ast.parse(text).body
    yield kind, f"then {text}", statement.lineno, lambda: _replace(block, index, [statement, *made])


def of_definition(function: ast.FunctionDef) -> Iterator[Change]:
    """What may be changed about a definition itself."""
    line = function.lineno
    quiet = ast.parse("torch.no_grad()", mode="eval").body
    yield "decorator", "torch.no_grad() added", line, lambda: function.decorator_list.append(quiet)
    for decorator in function.decorator_list:
        label = f"@{ast.unparse(decorator)[:40]} dropped"
        yield (
            "decorator",
            label,
            line,
            lambda decorator=decorator: function.decorator_list.remove(decorator),
        )
    parameters = function.args.args
    for index in range(len(parameters) - 1):
        one, two = parameters[index], parameters[index + 1]
        if one.arg in ("self", "cls"):
            continue

        def turn(one: ast.arg = one, two: ast.arg = two) -> None:
            one.arg, two.arg = two.arg, one.arg

        yield "parameters swapped", f"parameters {one.arg} and {two.arg} swapped", line, turn
