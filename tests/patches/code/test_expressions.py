import ast

import pytest

from veomni_hook.patches.code.tree import (
    chain,
    compared_with_none,
    decorator_name,
    is_plain,
)


def expression(text):
    return ast.parse(text, mode="eval").body


@pytest.mark.parametrize(
    ("text", "known"),
    [
        ("a.b.c", "a.b.c"), ("self.heads[i].out", "self.heads.out"), ("x[:, 0]", "x"), ("f(x).y", ""),
        ("x[f(1)]", ""), ("3", ""),
    ],
)  # fmt: skip
def test_chain(text, known):
    assert chain(expression(text)) == known


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("x[:, a.b:, -1].to(y.dtype)", True),
        ("getattr(self.config.get_text_config(), 'cap', None)", True),
        ("a if a is not None else b", True),
        ("f(x)", False), ("x.roll(1)", False), ("(y := x)", False), ("x.to(f(y))", False), ("(*x,)", False), ("f'{x}'", False),
    ],
)  # fmt: skip
def test_plain(text, plain):
    assert bool(is_plain(expression(text))) is plain


@pytest.mark.parametrize("text", ["a.hub", "hub", "a.hub(1)(2)"])
def test_a_decorator_has_one_name_called_or_not(text):
    assert decorator_name(expression(text)) == "hub"


@pytest.mark.parametrize(
    ("text", "operators", "compared"),
    [
        ("a.b is None", [ast.Is], "a.b"),
        ("f(x) is not None", [ast.Is, ast.IsNot], "f(x)"),
        ("a is None", [ast.IsNot], None),
        ("a is not False", [ast.IsNot], None),
        ("a is None is None", [ast.Is], None),
        ("not a", [ast.Is], None),
    ],
)
def test_what_is_compared_with_none(text, operators, compared):
    found = compared_with_none(expression(text), *operators)
    assert (None if found is None else ast.unparse(found)) == compared
