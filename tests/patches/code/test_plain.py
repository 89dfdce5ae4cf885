from __future__ import annotations

import ast

import pytest

from veomni_hook.patches.code.plain import Unclear, binding, chain, holds, is_plain, substituted


def expression(text):
    return ast.parse(text, mode="eval").body


@pytest.mark.parametrize(
    ("text", "known"),
    [
        ("a.b.c", "a.b.c"),
        ("self.heads[i].out", "self.heads.out"),
        ("x[:, 0]", "x"),
        ("f(x).y", ""),
        ("x[f(1)]", ""),
        ("3", ""),
    ],
)
def test_chain(text, known):
    assert chain(expression(text)) == known


@pytest.mark.parametrize(
    "text",
    [
        "x[:, a.b:, -1].to(y.dtype)",
        "getattr(self.config.get_text_config(), 'cap', None)",
        "a if a is not None else b",
        "not (x > 0 and y)",
        "kwargs.get('n')",
    ],
)
def test_plain(text):
    assert is_plain(expression(text))


@pytest.mark.parametrize(
    "text",
    ["f(x)", "x.roll(1)", "x.pop('a', 1)", "(y := x)", "[x]", "lambda: x", "x.to(f(y))", "(*x,)", "f'{x}'"],
)
def test_not_plain(text):
    assert not is_plain(expression(text))


def test_substituted():
    node = expression("a + b.a[a]")
    assert substituted(node, {"c": expression("1")}) is node
    assert ast.unparse(substituted(node, {"a": expression("x.y")})) == "x.y + b.a[x.y]"
    assert ast.unparse(node) == "a + b.a[a]"


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("a = f(x)", "a", "f(x)"),
        ("a: int = 1", "a", "1"),
        ("a: int", "", None),
        ("a = b = 1", "", None),
        ("a, b = c", "", None),
        ("a.b = c", "", None),
        ("a += 1", "", None),
        ("f(a)", "", None),
    ],
)
def test_binding(text, name, value):
    found, node = binding(ast.parse(text).body[0])
    assert found == name and (node is None if value is None else ast.unparse(node) == value)


def test_holds_and_unclear():
    statement = ast.parse("\nif a:\n    b = c + 1").body[0]
    inner = statement.body[0].value
    assert holds(statement, inner) and holds(inner, inner) and not holds(inner, statement)
    assert str(Unclear("it is odd", inner)) == "it is odd (line 3)"
    assert "line ?" in str(Unclear("made here", ast.Constant(1)))
