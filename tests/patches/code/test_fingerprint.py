import ast

import pytest

from tests.patches.upstream import source_of
from veomni_hook.patches.code.comparison import fingerprint, serialise
from veomni_hook.patches.code.document import Document


def digest(source):
    document = Document(source)
    return fingerprint(document.definitions()[0].node)


BASE = "def f(x, *, eps=1e-6):\n    y = x + 1\n    return g(y, eps)\n"


@pytest.mark.parametrize(
    "same",
    [
        "def other(x, *, eps=1e-6):\n    y = x + 1\n    return g(y, eps)\n",
        "@cached\n@hub('f')\ndef f(x, *, eps=1e-6):\n    y = x + 1\n    return g(y, eps)\n",
        "def f(x: int, *, eps: float = 1e-6) -> int:\n    y = x + 1\n    return g(y, eps)\n",
        'def f(x, *, eps=1e-6):\n    """Words."""\n    y = x + 1\n    return g(y, eps)\n',
        "def f(x, *, eps=1e-6):\n    y: int = x + 1\n    return g(y, eps)\n",
        "def f(x, *, eps=1e-6):\n    # why\n    y = (x\n         + 1)\n\n    return (g(y, eps,))  # so\n",
        "def f(x, *, eps=0.000001): y = x + 1; return g(y, eps)\n",
    ],
)
def test_what_does_not_change_the_code_keeps_the_digest(same):
    assert digest(same) == digest(BASE)


@pytest.mark.parametrize(
    "other",
    [
        "def f(x, eps=1e-6):\n    y = x + 1\n    return g(y, eps)\n",
        "def f(z, *, eps=1e-6):\n    y = z + 1\n    return g(y, eps)\n",
        "def f(x, *, eps=1e-6):\n    y = x + True\n    return g(y, eps)\n",
        "def f(x, *, eps=1e-6):\n    y = x + 1.0\n    return g(y, eps)\n",
        "def f(x, *, eps=1e-6):\n    y = x + 1\n    return g(y, eps=eps)\n",
        "async def f(x, *, eps=1e-6):\n    y = x + 1\n    return g(y, eps)\n",
    ],
)
def test_what_changes_the_code_changes_the_digest(other):
    assert digest(other) != digest(BASE)


def test_a_class_counts_its_methods_names_and_decorators_but_not_its_own():
    base = "class A(B):\n    def f(self):\n        return 1\n"
    assert digest(
        "@hub\nclass C(B):\n    'Words.'\n    inv: int\n    def f(self) -> int:\n        return 1\n"
    ) == digest(base)
    assert digest("class A(B):\n    def g(self):\n        return 1\n") != digest(base)
    assert digest("class A(B):\n    @staticmethod\n    def f(self):\n        return 1\n") != digest(base)
    assert digest("class A:\n    def f(self):\n        return 1\n") != digest(base)


def test_an_assignment_counts_its_value():
    assert digest("A: int = f(1)\n") == digest("B = f(1)\n") != digest("A = f(2)\n")
    assert digest("A: int\n") != digest("A: int = None\n")


def test_a_text_cannot_be_mistaken_for_another_tree():
    assert serialise(ast.parse("f('a,b')")) != serialise(ast.parse("f('a','b')"))
    assert serialise(ast.parse("f('1')")) != serialise(ast.parse("f(1)"))
    assert serialise(ast.parse("{**a}")) != serialise(ast.parse("{a}"))
    assert serialise(ast.parse("return None")) != serialise(ast.parse("return"))


def test_f_strings_are_cut_the_same_on_every_release():
    node = ast.parse("f'a{x}b'").body[0].value
    node.values = [ast.Constant("a"), ast.Constant(""), node.values[1], ast.Constant("b"), ast.Constant("")]
    assert serialise(node) == serialise(ast.parse("f'a{x}b'", mode="eval").body)
    assert serialise(ast.parse("f'{x:}'")) == serialise(ast.parse("f'{x}'"))
    assert serialise(ast.parse("f'{x:>3}'")) != serialise(ast.parse("f'{x}'"))


EVERYTHING = '''
async def f(a, /, b: int = 1, *args: T, c="ü\\U0001fae8", d=b"\\x00", **kw) -> None:
    """Doc."""
    x: list[int] = [i async for i in a if i > -1 and not (b or c)]
    async with m() as (p, q), n:
        p[1:2, ..., ::3].z = {**kw, "k": 1j}
    try:
        y = lambda u, *v, w=0x1F: (yield u)
    except (A, B) as e:
        raise X(f"{e!r:>{b}} {b=} tail") from e
    else:
        global g
    finally:
        del x[0], y
    match a:
        case {"t": [1, *rest], **more} if rest:
            pass
        case C(x=None, y=D()) | 3.5:
            assert a, "m"
    for i, (j, *k) in zip(a, b):
        while (n := i @ j) is not None:
            break
        else:
            continue
    @deco
    def inner(t, *, s=1_000): return t if s else ~t
    a += 1
    return await inner(*args, s={1, 2}, **kw), 1e400, a < b <= c != d
'''


def test_the_digest_of_every_construct_is_the_recorded_one():
    # A release of Python that changes this value would change every digest in every spec.
    assert digest(EVERYTHING) == "532625ef8f357b8a"


# One value for all supported releases in which upstream's body is the same; the nox matrix runs each.
QWEN3 = {
    "Qwen3RMSNorm.forward": {"6e16a56ab42b9201"},
    "Qwen3MLP.forward": {"12e57c6c096c1151"},
    "rotate_half": {"96e90fdf2ac7b293"},
    "apply_rotary_pos_emb": {"0452ddba8171723c"},
    "Qwen3Attention.forward": {"3fdb0ad7af5851d6", "6193b5c7c0182b04", "4789954e04dd8d6a"},
    "Qwen3ForCausalLM.forward": {"fd849d519001e0d3", "033c73c2a907aef2", "d98c24daeb505283", "8fccccff01baba68"},
}  # fmt: skip


@pytest.mark.parametrize("target", QWEN3)
def test_installed_qwen3_has_a_recorded_digest(target):
    (definition,) = Document(source_of("qwen3")).find(target)
    assert fingerprint(definition.node) in QWEN3[target]
