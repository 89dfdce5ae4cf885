import textwrap

import pytest

from veomni_hook.patches.code.calls import Calls
from veomni_hook.patches.code.document import Document

FUNCTION = """
def turn(q, k):
    return q, k
"""


def calls(text, *names):
    return Calls(Document(FUNCTION + textwrap.dedent(text)), names or ("turn",), notes="use_kernel")


def found(text, name="turn"):
    """Every use as (owner, where); a leak's owner is '!'."""
    sites = calls(text).sites(name)
    return [("!" if site.leak else site.owner, site.where) for site in sites]


def in_method(body, head="class Attention(Module):", signature="def forward(self, q, k):"):
    return f"{head}\n    {signature}\n" + textwrap.indent(textwrap.dedent(body), " " * 8)


@pytest.mark.parametrize(
    "body",
    [
        "return turn(q, k)",
        "return turn(*[q, k])",
        "q, k = (\n    turn  # why\n)(q, **{'k': k})",
        "fn = turn\nreturn fn(q, k)",
        "fn = partial(turn, q)\nreturn fn(k=k)",
        "return (turn if self.rotates else other)(q, k)",
        "fn = turn if self.rotates else other\nreturn fn(q, k)",
        "return (lambda q: turn(q, k))(q)",
        "return [turn(each, k) for each in q]",
    ],
)
def test_calls_where_self_is_at_hand(body):
    assert found(in_method(body)) == [("self", "Attention.forward")]


def test_a_call_in_a_function_inside_a_method():
    body = "def inner(q):\n    return turn(q, k)\nreturn inner(q)"
    assert found(in_method(body)) == [("self", "Attention.forward.<locals>.inner")]


@pytest.mark.parametrize(
    "body",
    [
        "def inner(self):\n    return turn(q, k)\nreturn inner(q)",
        "return (lambda self: turn(self, k))(q)",
        "return [turn(self, k) for self in q]",
        "self = q\nreturn turn(q, k)",
    ],
)
def test_another_self(body):
    ((owner, _),) = found(in_method(body))
    assert owner == ""


WITHOUT_A_MODULE = [
    "def run(module, q, k):\n    return turn(q, k)",
    in_method("return turn(q, k)", signature="@staticmethod\n    def forward(q, k):"),
    in_method("return turn(q, k)", head="class Plain:"),
    in_method("return f'{turn(q, k)}'"),
    in_method("return fn(q)", signature="def forward(self, q, fn=lambda q: turn(q, q)):"),
    in_method("return q", signature="@wrapped(lambda q: turn(q, q))\n    def forward(self, q):"),
    in_method("return turn(q, k)", signature="def forward():"),
]
NOT_FOLLOWED = [
    in_method("return self.inner(turn, q)"),
    in_method("fn = turn\nreturn self.inner(fn)"),
    in_method("global fn\nfn = turn\nreturn fn(q, k)"),
    in_method("return turn"),
    in_method("return (one if turn else other)(q, k)"),
    in_method("return partial(other, turn)(q, k)"),
    in_method("return fn(q, k)", signature="def forward(self, q, k, fn=turn):"),
    in_method("self.fn, x = turn, 1"),
    "TABLE = {'rope': turn}",
    "@decorated(turn)\nclass Attention(Module):\n    pass",
    "class Attention(Module):\n    fn = staticmethod(turn)",
]


@pytest.mark.parametrize("text", WITHOUT_A_MODULE + NOT_FOLLOWED)
def test_calls_without_a_module_and_uses_that_are_not_followed_are_told(text):
    (site,) = calls(text).sites("turn")
    assert site.reason and not site.owner and site.leak is (text in NOT_FOLLOWED)


@pytest.mark.parametrize(
    "text",
    [
        in_method("turn = self.turn\nreturn turn(q, k)"),
        in_method("return [turn(q, k) for turn in self.all]"),
        in_method("return self.turn(q, k)"),
        in_method("return q", signature="def forward(self, q: 'turn'):"),
        "@use_kernelized_func(turn)\nclass Attention(Module):\n    pass",
    ],
)
def test_what_is_no_use(text):
    assert found(text) == []


@pytest.mark.parametrize(
    ("more", "expected"), [("", ("self", "Attention.forward")), ("rotate = other\n", ("!", ""))]
)
def test_an_alias_of_the_module_is_bound_once(more, expected):
    assert found(f"rotate = turn\n{more}" + in_method("return rotate(q, k)")) == [expected]


ATTRIBUTE = """
class Attention(Module):
    def __init__(self):
        self.fn = turn

    def forward(self, q, k):
        return self.fn(q, k)


class Local(Attention):
    def forward(self, q, k):
        return self.fn(k, q)


class Elsewhere(Module):
    def forward(self, q, k):
        return self.fn(q, k)
"""


def test_an_attribute_is_followed_into_subclasses():
    sites = calls(ATTRIBUTE).sites("turn")
    assert [(site.owner, site.where, site.only_if) for site in sites] == [
        ("self", "Attention.forward", "turn"),
        ("self", "Local.forward", "turn"),
    ]


def test_an_attribute_of_a_distant_subclass_and_of_others():
    text = ATTRIBUTE.replace("class Elsewhere(Module)", "class Elsewhere(Local)")
    assert found(text)[-1] == ("self", "Elsewhere.forward")
    text = ATTRIBUTE.replace("return self.fn(k, q)", "return q.fn(k)")
    assert found(text) == [("self", "Attention.forward")]


def test_an_attribute_that_is_handed_on_is_a_leak():
    text = ATTRIBUTE + "\n    def other(self, q):\n        return 0\n"
    text = text.replace("return self.fn(k, q)", "return self.run(self.fn)")
    assert [site.leak for site in calls(text).sites("turn")] == [False, True]


def test_an_attribute_for_two_functions_asks_for_one():
    text = ATTRIBUTE.replace("self.fn = turn", "self.fn = turn\n        self.fn = other")
    both = calls("def other(q, k):\n    return k, q\n" + text, "turn", "other")
    assert [bool(site.owner) for name in ("turn", "other") for site in both.sites(name)] == [True] * 2 + [
        False
    ] * 2


@pytest.mark.parametrize(
    ("text", "again"),
    [
        ("", False),
        ("turn = wrap(turn)", True),
        ("if fast:\n    from hub import turn", True),
        ("try:\n    import hub\nexcept ImportError:\n    def turn(q, k):\n        return q", True),
    ],
)
def test_a_second_binding(text, again):
    assert bool(calls(text).rebound("turn")) is again
