import ast
import textwrap

import pytest

from veomni_hook.patches.code.statement_runs import Run, at_hand, called, put_together


def statements(text):
    return ast.parse(textwrap.dedent(text)).body


def part(text, code):
    """The expression of ``code`` that is written as ``text``."""
    nodes = (node for each in code for node in ast.walk(each) if isinstance(node, ast.expr))
    return next(node for node in nodes if ast.unparse(node) == text)


def together(text, taken="", **operands):
    code = statements(text)
    if not taken:
        made = put_together(code)
    else:
        found = {name: part(operand, code) for name, operand in operands.items()}
        made = put_together(code, part(taken, code), found, "kernel")
    assert [ast.unparse(each) for each in code] == [ast.unparse(each) for each in statements(text)]
    return None if made is None else ast.unparse(made)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("y = x + 1\nx = f(x)\ng(y, x)", "g(x + 1, f(x))"),  # a name means what it did when it was read
        ("a = x\nb = self.y\ng(a, a, b, b)", "g(x, x, self.y, self.y)"),  # nothing is computed twice
    ],
)
def test_statements_become_one(text, expected):
    assert together(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "a = f(x)\ng(a, a)", "a = f(x)\ng(x)", 
        "a = x + y\nb = f(x)\ng(a * a, b)", "a = f(x)\ng(a) if x else x", 
        "a = f(x)\n[a for _ in y]", "a = f(x)\n(lambda: a)()", "a, b = f(x)\ng(a)", 
        "a = (b := f(x))\ng(a)", "a += f(x)\ng(a)", "a = f(x)\npass",
    ],
)  # fmt: skip
def test_what_would_be_computed_twice_or_never_or_in_another_order(text):
    assert together(text) is None


@pytest.mark.parametrize(
    ("text", "taken", "up", "expected"),
    [
        ("a = act(f(x))\nb = g(x)\nd(a * b)", "a * b", "g(x)", "d(kernel(f(x), g(x), act))"),
        # In upstream's order.
        ("d(g(x) * act(f(x)))", "g(x) * act(f(x))", "g(x)", "d(kernel(up=g(x), gate=f(x), activation=act))"),
        # A call between would move.
        ("a = act(f(x))\nx = h(a)\nd(a * x)", "a * x", "h(a)", None),
    ],
)
def test_a_kernel_takes_the_place_of_an_expression(text, taken, up, expected):
    assert together(text, taken, gate="f(x)", up=up, activation="act") == expected


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("x", "x"), ("self.gate(x)", "x"), ("self.gate(x).to(torch.float32)", "x"), 
        ("self.scale * f(x)", "x"), ("x[..., 0]", "x"), ("parts[0]", None), 
    ],
)  # fmt: skip
def test_at_hand(text, name):
    assert at_hand(ast.parse(text, mode="eval").body) == name


def test_called():
    whole = ast.parse("d(kernel(up=u, gate=g))", mode="eval").body
    assert ast.unparse(called(whole, "kernel", "gate")) == "g"
    whole = ast.parse("d(kernel(g, u))", mode="eval").body
    assert ast.unparse(called(whole, "kernel", "gate")) == "g"


FUNCTION = """
def forward(self, x, flag):
    a = self.f(x)
    if flag:
        b = a
    else:
        b = x
    def inner():
        return 1
    c = a * b
    return c
"""


def test_runs_grow_over_assignments_only():
    (function,) = statements(FUNCTION)
    run = Run(function, function.body, 4, 4)
    assert [each.first for each in run.longer(5)] == [4, 3]
    (made,) = statements(ast.unparse(list(run.longer(5))[1].as_function()))
    assert ast.unparse(made) == "def forward(self, a, b, c):\n    c = a * b\n    return c"
