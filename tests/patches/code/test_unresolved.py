"""Undefined global names of a module; the result must be exact, because they raise an error."""

import ast
import textwrap

import pytest

from veomni_hook.patches.code.scope import provided_names, unresolved_names, unresolved_uses


def missing(code):
    text = textwrap.dedent(code)
    return unresolved_names(text, ast.parse(text))


@pytest.mark.parametrize(
    "code",
    [
        "def f(*, x=nothing): pass",
        "@nothing\ndef f(): pass",
        "class A(nothing): pass",
        "class A(metaclass=nothing): pass",
        "class A:\n    own = 1\n    def f(self): return own, nothing\nown = 2",
        "def f() -> nothing: pass",
        "x: nothing = 1",
        "class A:\n    x: nothing",
        "f = lambda: nothing",
        "def f(xs): return [nothing for x in xs]",
        "def f():\n    global nothing\n    return nothing",
        "def f():\n    nothing.x = 1",
        "def f():\n    del nothing[0]",
        "def f(x):\n    match x:\n        case nothing.y: return x",
        "def f(x):\n    match x:\n        case nothing(): return x",
        "def f():\n    try: pass\n    except nothing: pass",
        "def f(): return f'{nothing!r:>{1}}'",
        "def f():\n    try: return nothing\n    except Exception: pass",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from a import nothing\ndef f(): return nothing",
    ],
)
def test_what_nothing_provides(code):
    assert missing(code) == {"nothing"}
    text = textwrap.dedent(code)
    assert [use.name for use in unresolved_uses(ast.parse(text), {"nothing"})][:1] in (["nothing"], [])


@pytest.mark.parametrize(
    "code",
    [
        "def f(x): return len(x), __name__, __file__, __debug__, super, NotImplemented",
        "from a import *\ndef f(): return anything",
        "globals()['x'] = 1\ndef f(): return x",
        "exec('x = 1')\ndef f(): return x",
        "def g():\n    global made\n    made = 1\ndef f(): return made",
        "try:\n    import quick\nexcept ImportError:\n    quick = None\ndef f(): return quick",
        "if 1 > 2:\n    def sometimes(): pass\ndef f(): return sometimes()",
        "if (walrus := 1): pass\ndef f(): return walrus",
        "import a.b.c\ndef f(): return a.b.c",
        "def f(xs): return [y for x in xs if (y := x)], y",
        "def f():\n    try: pass\n    except ValueError as error: return error",
        "def f(x):\n    match x:\n        case [first, *rest]: return first, rest\n"
        "        case {'a': a, **others}: return a, others\n        case int() as n: return n",
        "class A:\n    def f(self): return __class__, super()",
        "class A:\n    x = 1\n    y = x",
        "def f():\n    x = 1\n    def g():\n        nonlocal x\n        x += 1\n        return x\n    return g",
        "async def f():\n    async with a() as b:\n        async for c in b: yield c\nasync def a(): pass",
        "def f(x: 'anything') -> 'Optional[anything]': pass",
        "from __future__ import annotations\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from a import T\n"
        "def f(x: T) -> T: return x\nclass A:\n    y: T",
        "from __future__ import annotations\ndef f(x: anything): pass",
        "def f():\n    x: anything = 1\n    return x",
        "class A:\n    def f(self):\n        self.x: anything = 1",
        "try:\n    profile\nexcept NameError:\n    pass",
        "def f():\n    try: return anything\n    except (NameError, KeyError): return None",
        "import typing\nif typing.TYPE_CHECKING:\n    import x\nelse:\n    x = None\ndef f(): return x",
    ],
)
def test_what_is_provided_or_cannot_be_told(code):
    assert missing(code) == set()


def test_a_local_variable_elsewhere_does_not_hide_nor_reveal():
    code = "def f():\n    tmp = 1\n    return tmp\ndef g(): return tmp\n"
    (use,) = unresolved_uses(ast.parse(code), {"tmp"})
    assert (use.name, use.node.lineno) == ("tmp", 4)


def test_names_that_a_module_provides():
    text = "import a.b\nfrom c import d as e\nX = 1\nclass Y: z = 1\ndef f():\n    global made\n    made = inner = 1\n"
    assert provided_names(text, ast.parse(text)) == {"a", "e", "X", "Y", "f", "made"}
