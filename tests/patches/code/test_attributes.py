"""Attributes that ``__init__`` sets."""

from __future__ import annotations

import ast

from veomni_hook.patches.code.attributes import initialised, name_of_own, statements_of_init

TEXT = """
class A:
    x = 1
    def __init__(self, n):
        self.a = n
        other.b = n
        c = self.a
        if n:
            self.d, self.e = n
            self.f = self.g = Linear(n)
    def forward(self):
        self.h = 1
"""


def owner() -> ast.ClassDef:
    (node,) = ast.parse(TEXT).body
    assert isinstance(node, ast.ClassDef)
    return node


def test_only_plain_assignments_of_init_to_self() -> None:
    found = {name: ast.unparse(value) for name, value in initialised(owner())}
    assert found == {"a": "n", "f": "Linear(n)", "g": "Linear(n)"}


def test_a_class_without_init() -> None:
    (node,) = ast.parse("class A: pass").body
    assert isinstance(node, ast.ClassDef)
    assert list(initialised(node)) == list(statements_of_init(node)) == []


def test_attributes_of_self() -> None:
    texts = ("self.a", "self.a.b", "this.a", "self", "self.a[0]")
    assert [name_of_own(ast.parse(text, mode="eval").body) for text in texts] == ["a", "", "", "", ""]
