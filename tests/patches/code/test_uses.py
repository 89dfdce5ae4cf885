from __future__ import annotations

import ast

import pytest

from veomni_hook.patches.code.uses import global_bindings, global_uses, has_star_import


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("X", [1]),
        ("X = 1", []),
        ("X += 1", [1]),
        ("del X", [1]),
        ("def f(a=X, *, b=X): pass", [1, 1]),
        ("def f(X): return X", []),
        ("def f():\n    X = 1\n    return X", []),
        ("def f():\n    global X\n    X = 1\n    return X", [4]),
        ("def f():\n    def g(): return X\n    X = 1", []),
        ("def f():\n    def g(): return X\n    return g", [2]),
        ("class C(X, k=X):\n    y = X", [1, 1, 2]),
        ("class C:\n    X = 1\n    def m(self): return X", [3]),
        ("lambda X: X", []),
        ("lambda a=X: a", [1]),
        ("[X for X in y]", []),
        ("[y for y in X]", [1]),
        ("[y for a in b for y in X if X]", [1, 1]),
        ("[X for X in X]", [1]),
        ("@X\ndef f(): pass", [1]),
        ("def f() -> 'X | None': pass", [1]),
        ("a: 'list[X]' = 1", [1]),
        ("a: Literal['X'] = 1", []),
        ("a = 'X'", []),
        ("a: 'not python at X ='", []),
        ("o.X; f(X=1)", []),
        ("from a import X", []),
        ("try:\n    pass\nexcept X as e:\n    raise X", [3, 4]),
    ],
)
def test_uses(source: str, lines: list[int]) -> None:
    assert [use.node.lineno for use in global_uses(ast.parse(source), ["X"])] == lines


def test_bindings() -> None:
    source = """
import a.b, c as d
from e import f as g
if a:
    h = 1
    def i(): j = 1
for k in a: pass
with a as l: pass
try: pass
except a as m: pass
class n: o = 1
(p := 1)
def q():
    global r
    r = 1
"""
    assert global_bindings(ast.parse(source)) == set("adghiklmnpqr")


def test_star_imports() -> None:
    assert has_star_import(ast.parse("if 1:\n    from a import *"))
    assert not has_star_import(ast.parse("from a import b"))
