import ast

import pytest

from veomni_hook.patches.code.scope import (
    bound_names,
    global_bindings,
    global_uses,
    local_names,
    nested_names,
    own_names,
    used_names,
)

SOURCE = """
def f(a, /, b=d0, *c, d=d1, **e):
    global g
    g = 1
    import p.q, r as s
    from t import u as v, w
    x, (y, *z) = aa
    aa2: T = 1
    bb += 1
    for cc in dd: pass
    with ee as ff: pass
    try: pass
    except gg as hh: pass
    match ii:
        case {"k": jj, **kk}: pass
        case [*ll] | mm: pass
    [nn for nn in oo if (pp := nn)]
    lambda qq, *rr: (ss := qq)
    def tt(uu):
        vv = 1
    @ww((wx := 1))
    class xx(yy):
        zz = 1
    del ab
    ac.ad = ae["af"]
    ag(ah=ai)
"""
(FUNCTION,) = ast.parse(SOURCE).body
assert isinstance(FUNCTION, ast.FunctionDef)

LOCALS = set("a b c d e p s v w x y z aa2 bb cc ff hh jj kk ll mm pp tt wx xx ab".split())
INNER = set("nn qq rr ss uu vv zz".split())


def test_locals_are_those_of_the_functions_own_scope():
    assert local_names(FUNCTION) == LOCALS


def test_bound_names_are_those_of_every_scope():
    assert bound_names([FUNCTION]) == LOCALS | INNER | {"f", "g"}


def test_used_names_are_bound_or_read_but_no_attributes_and_keywords():
    read = set("d0 d1 aa T dd ee gg ii oo ww yy ac ae ag ai".split())
    assert used_names([FUNCTION]) == LOCALS | INNER | {"f", "g"} | read


def test_own_names_are_bound_where_the_statements_stand():
    tree = ast.parse("x = [y for y in x]\nz = lambda a: (b := a)\n[(c := d) for d in x]\ndef f(e): g = 1\n")
    assert own_names(tree.body) == set("xzcf")


def test_nested_names_are_bound_in_scopes_inside():
    tree = ast.parse("x = 1\n[y for y in x]\nlambda z, *w: z\ndef f(a=b):\n    c = 1\nclass D:\n    e = 1\n")
    assert nested_names(tree) == set("yzwace")


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("X = 1", []),
        ("del X", [1]),
        ("def f(a=X, *, b=X): pass", [1, 1]),
        ("def f(X): return X", []),
        ("def f():\n    global X\n    X = 1\n    return X", [4]),
        ("def f():\n    def g(): return X\n    X = 1", []),
        ("def f():\n    def g(): return X\n    return g", [2]),
        ("class C(X, k=X):\n    y = X", [1, 1, 2]),
        ("class C:\n    X = 1\n    def m(self): return X", [3]),
        ("lambda X: X", []),
        ("[X for X in y]", []),
        ("[y for a in b for y in X if X]", [1, 1]),
        ("[X for X in X]", [1]),
        ("def f() -> 'X | None': pass", [1]),
        ("a: 'list[X]' = 1", [1]),
        ("a: Literal['X'] = 1", []),
        ("a: 'not python at X ='", []),
        ("o.X; f(X=1)", []),
        ("from a import X", []),
        ("try:\n    pass\nexcept X as e:\n    raise X", [3, 4]),
    ],
)
def test_uses(source, lines):
    assert [use.node.lineno for use in global_uses(ast.parse(source), ["X"])] == lines


def test_bindings():
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
