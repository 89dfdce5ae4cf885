import ast

import pytest

from veomni_hook.patches.code.tree import blocks, initialised, module_statements

SOURCE = """\
import a
try:
    import b
except ImportError:
    if a:
        b = 1
    else:
        b = 2
finally:
    c = 1
match a:
    case 1:
        d = 1
with a:
    e = 1
def f():
    hidden = 1
class A:
    hidden = 1
"""


def test_module_statements_stay_out_of_functions_and_classes():
    found = [
        ast.unparse(s) for s in module_statements(ast.parse(SOURCE)) if isinstance(s, ast.Assign | ast.Import)
    ]
    assert sorted(found) == ["b = 1", "b = 2", "c = 1", "d = 1", "e = 1", "import a", "import b"]


FUNCTION = """
def forward(self, x, flag):
    try:
        a = self.f(x)
    except ValueError:
        a = x
    def inner():
        return 1
    match flag:
        case 1:
            b = a
    return b
"""


@pytest.mark.parametrize(
    ("nested", "texts"),
    [(False, ["a = self.f(x)", "a = x", "b = a"]), (True, ["a = self.f(x)", "return 1", "a = x", "b = a"])],
)
def test_blocks_of_a_function(nested, texts):
    (function,) = ast.parse(FUNCTION).body
    first, *inner = blocks(function, nested=nested)
    assert len(first) == 4 and sorted(ast.unparse(block[0]) for block in inner) == sorted(texts)


def test_locals_that_are_bound_once_and_methods_that_init_calls():
    (node,) = ast.parse(
        "class A:\n"
        "    def __init__(self, n, wide):\n"
        "        kept = Linear(n)\n"
        "        self.a = kept\n"
        "        wide = Linear(2 * n)\n"
        "        self.b = wide\n"
        "        self.build()\n"
        "    def build(self):\n"
        "        self.c: int = 1\n"
        "        self.d = Linear(3)\n"
        "        self.__init__(1, 2)\n"
        "    def later(self):\n"
        "        self.e = 2\n"
    ).body
    found = {name: ast.unparse(value) for name, value in initialised(node)}
    assert found == {"a": "Linear(n)", "b": "wide", "d": "Linear(3)"}
