"""Formulas with holes, matched against forms."""

import ast

import pytest

from tests.patches.graph.code import form, forward, method_form
from veomni_hook.patches.graph import (
    ANY,
    ARGUMENT,
    ATTRIBUTE,
    FUNCTION,
    NUMBER,
    Difference,
    Match,
    Rule,
    find,
    match,
    source,
)

SCALED = form("def f(x, w, eps):\n    return w * (x.float() + eps).to(x.dtype)\n")
RULES = {"x": ARGUMENT, "w": ATTRIBUTE, "eps": NUMBER}


@pytest.mark.parametrize(
    ("body", "eps"),
    [
        ("return self.gain * (h.float() + self.epsilon).to(h.dtype)", "self.epsilon"),
        ("y = h.to(torch.float32)\n        return (y + 1e-6).type_as(h) * self.gain", "1e-06"),
        ("return self.gain * (h.float() + 1).to(h.dtype)", "1.0"),
    ],
)
def test_holes_are_bound(body, eps):
    found = match(SCALED, forward(body), RULES)
    assert isinstance(found, Match), found
    assert {name: source(node) for name, node in found.bindings.items()} == {
        "x": "h",
        "w": "self.gain",
        "eps": eps,
    }


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("return self.gain * (h.float() - self.eps).to(h.dtype)", "found (h.to(torch.float32) - self.eps"),
        ("return self.gain * (h.float() + self.eps)", "as w, found self.gain.to(torch.float32)"),
        ("return (self.gain * (h.float() + self.eps)).to(h.dtype)", "expected (w * "),
        ("return h * (h.float() + self.eps).to(h.dtype)", "an attribute of self as w, found h"),
        (
            "return self.gain * (h.float() + k).to(h.dtype)",
            "an attribute of self or a number as eps, found k",
        ),
        ("return self.gain * (h.float() + self.eps).to(k.dtype)", "expected h"),
    ],
)
def test_the_first_difference_in_words(body, words):
    found = match(SCALED, forward(body, "h, k"), RULES)
    assert isinstance(found, Difference)
    assert words in found.text
    assert f"(line {found.lineno})" in found.text
    assert 0 <= found.depth < 1


def test_both_orders_are_tried_together():
    # The first product matches in either order; only one of them leaves `b` for the second.
    pattern = form("def f(a, b):\n    return (a * b) - b\n")
    found = match(pattern, form("def f(p, q):\n    return (q * p) - p\n"))
    assert isinstance(found, Match)
    assert {name: source(node) for name, node in found.bindings.items()} == {"a": "q", "b": "p"}
    assert isinstance(match(pattern, form("def f(p, q, r):\n    return (q * p) - r\n")), Difference)


def test_effects_have_to_match():
    pattern = form("def f(x):\n    return x * 2\n")
    assert isinstance(match(pattern, form("def f(x, log):\n    log(x)\n    return x * 2\n")), Difference)
    assert isinstance(match(pattern.result, form("def f(x, log):\n    log(x)\n    return x * 2\n")), Match)


#: Every module is callable, so a rule determines which are activations.
ACTIVATION = Rule("an activation", lambda node: FUNCTION.accepts(node) and node.value not in ("up", "gate"))
GATED = form("def f(gate, up, act):\n    return act(gate) * up\n")


@pytest.mark.parametrize(
    ("body", "act"),
    [
        ("return self.down(self.act_fn(self.gate(h)) * self.up(h))", "self.act_fn"),
        ("return self.down(self.up(h) * F.silu(self.gate(h)))", "F.silu"),
        ("return self.down(self.up(h) * nn.functional.gelu(self.gate(h)))", "nn.functional.gelu"),
        ("return self.down(torch.mul(ACT2FN[self.kind](self.gate(h)), self.up(h)))", "ACT2FN[self.kind]"),
    ],
)
def test_a_formula_inside(body, act):
    (found,) = find(GATED, forward(body), {"act": ACTIVATION})
    assert source(found.bindings["act"]) == act
    assert found.bindings["gate"].origin is not None
    assert ast.unparse(found.bindings["gate"].origin) == "self.gate(h)"
    assert ast.unparse(found.bindings["up"].origin or ast.Pass()) == "self.up(h)"


@pytest.mark.parametrize(
    "body",
    [
        "return self.act_fn(h) + self.up(h)",
        "return F.gelu(h, approximate='tanh') * self.up(h)",
        "return h.sigmoid() * self.up(h)",
        "return self.act_fn(h, 2) * h",
        "return (lambda x: x)(h) - h",
    ],
)
def test_no_formula_inside(body):
    assert not list(find(GATED, forward(body), {"act": ACTIVATION, "up": ANY}))


@pytest.mark.parametrize(
    ("helper", "call"),
    [
        ("def silu(x, scale):\n    return F.silu(x)\n", "silu(h, 2)"),
        ("def silu(pair):\n    return F.silu(pair[0])\n", "silu(h)"),
        ("", "F.silu(h.float()).to(torch.float32)"),
    ],
)
def test_a_function_that_does_more_is_not_the_activation(helper, call):
    text = f"{helper}class M(nn.Module):\n    def forward(self, h):\n        return {call} * h\n"
    assert not list(find(GATED, method_form(text), {"act": ACTIVATION}))


def test_a_formula_on_every_way_and_in_loops():
    text = """
        if self.flag:
            y = self.act(h) * self.up(h)
        else:
            y = F.silu(h) * h
        for x in h:
            y = y - self.act(x) * x
        return y
    """.strip()
    found = list(find(GATED, forward(text), {"act": ACTIVATION}))
    assert sorted(source(one.bindings["act"]) for one in found) == ["F.silu", "self.act", "self.act"]


def test_what_stands_for_a_followed_call_is_the_call():
    text = """
    class M(nn.Module):
        def gated(self, both):
            gate, up = both.chunk(2, dim=-1)
            return self.act(gate) * up

        def forward(self, h):
            return self.down(self.gated(self.both(h)))
    """
    (found,) = find(GATED, method_form(text), {"act": ACTIVATION})
    assert ast.unparse(found.node.origin or ast.Pass()) == "self.gated(self.both(h))"


def test_a_sign_that_moved_is_nobodys_expression():
    found = form("def f(x, y):\n    return -x * y\n").result
    assert found.op == "neg"
    assert ast.unparse(found.origin or ast.Pass()) == "-x * y"
    assert found.args[0].origin is None
