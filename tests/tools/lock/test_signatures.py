from __future__ import annotations

import ast

import pytest

from veomni_hook.tools.lock.signatures import difference, signature


def of(text: str) -> str:
    return signature(ast.parse(text).body[0])


def test_annotations_do_not_belong_to_a_signature() -> None:
    assert of("def f(self, x: int = 1, *a: str, k: int, **kw: int) -> int: ...") == "(self, x=1, *a, k, **kw)"


def test_a_class_has_the_signatures_of_its_methods() -> None:
    assert (
        of("class A:\n    x = 1\n    def f(self): ...\n    async def g(self, y=None): ...")
        == "f(self)\ng(self, y=None)"
    )
    assert of("x = 1") == ""


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("(a, b=1)", "(a, b=1)", ""),
        ("(a, b)", "(a)", "no b any more"),
        ("(a)", "(a, b=1, **kwargs)", "new: b=1, **kwargs"),
        ("(a, b=1)", "(a, b=2)", "b=1 is now b=2"),
        ("(a, b)", "(a, *, b)", "b is now b (keyword only)"),
        ("(a, b)", "(a, /, b)", "a is now a (positional only)"),
        ("(a, b)", "(b, a)", "the parameters have another order"),
        ("(a, x='1')", '(a, x="1")', ""),
        ("(*args)", "(**kwargs)", "no *args any more; new: **kwargs"),
        ("f(a)\ng(a)", "f(a, b)\nh(a)", "no method g any more; new method h; f: new: b"),
        ("", "", ""),
    ],
)
def test_what_differs_is_said_in_words(old: str, new: str, said: str) -> None:
    assert difference(old, new) == said
