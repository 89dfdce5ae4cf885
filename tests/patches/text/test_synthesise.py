"""Rendering of nodes: readable where astor can, right in any case."""

from __future__ import annotations

import ast

import pytest

from veomni_hook.patches.text.synthesise import render

CALL = f"call({', '.join(f'argument_number_{n}=value_number_{n}' for n in range(12))})"


@pytest.mark.parametrize(
    "source",
    [
        "nn.Module",
        CALL,
        "(a, *b)[0]",
        "x: int = 3",
        "(x): int = 3",
        "if (n := len(a)) > 10:\n    pass",
        "match x:\n    case {'a': 1, **rest}:\n        pass",
        "try:\n    pass\nexcept* ValueError:\n    pass",
        "def f(a, /, b, *, c=1, **d) -> int:\n    return f'{a!r:>{b}}'",
        "async def f():\n    return [x async for x in y]",
        "'it\\'s'",
        "-1 ** 2",
    ],
)
def test_what_is_rendered_parses_back(source: str) -> None:
    statement = ast.parse(source).body[0]
    node = statement.value if isinstance(statement, ast.Expr) else statement
    again = ast.parse(render(node)).body[0]
    assert ast.dump(
        again.value if isinstance(again, ast.Expr) and isinstance(node, ast.expr) else again
    ) == ast.dump(node)


def test_long_calls_are_wrapped() -> None:
    expression = ast.parse(CALL, mode="eval").body
    assert max(map(len, render(expression).splitlines())) <= 110 < len(ast.unparse(expression))


def test_a_rendering_of_astors_that_means_something_else_is_not_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import astor

    monkeypatch.setattr(astor, "to_source", lambda node: "other\n")
    assert render(ast.parse("name", mode="eval").body) == "name"
