"""Statements: locals are substituted, in-place changes are followed or refused, branches split and join."""

import itertools

import pytest
import torch

from tests.patches.graph.code import executed, form, method_form, one, outcome, same, unknown
from veomni_hook.patches.graph import Form, digest
from veomni_hook.patches.reasons import Code, Reason


@pytest.mark.parametrize(
    "body",
    [
        "y = x.float()\n    z: object = y * 2\n    return z",
        "x = x.float()\n    x = x * 2\n    return x",
        "y, z = x.float(), 2\n    return y * z",
        "[y, (z, w)] = [x.float(), (2, 3)]\n    return y * z",
        '"""Says something."""\n    pass\n    y = x.float()\n    del_me = 1\n    del del_me\n    return y * 2',
        "return (y := x.float()) * 2",
        "*rest, last = (1, 2, x.float())\n    return last * rest[1]",
    ],
)
def test_locals_go_forward(body):
    assert same(f"def f(x):\n    {body}\n", one("x.float() * 2"))


@pytest.mark.parametrize(
    "body",
    [
        "y = x + 1.5\n    y *= 2\n    return y",
        "y = x + 1.5\n    y = y.mul_(2)\n    return y",
        "y = x + 1.5\n    y.mul_(2)\n    return y",
        "return (x + 1.5).mul_(2)",
    ],
)
def test_what_is_the_functions_own_may_change_in_place(body):
    changed, plain = (
        f"def f(x):\n    {body}\n",
        "def f(x):\n    y = (x + 1.5) * 2\n    return y.to((x + 1.5).dtype)\n",
    )
    assert same(changed, plain)
    x = torch.randn(5).bfloat16()
    assert torch.equal(executed(changed)(x), executed(plain)(x))


@pytest.mark.parametrize(
    "body",
    [
        "x *= 2\n    return x",
        "x[..., 0] = 1\n    return x",
        "x[0] += 1\n    return x",
        "y = x.float()\n    y *= 2\n    return y",  # the same tensor if x is float32
        "y = x.view(-1)\n    y.add_(1)\n    return y",
        "y = x[..., :2]\n    y += 1\n    return x",
        "y = g(x)\n    y *= 2\n    return y",  # g may return x
        "y = x + 1\n    z = y.view(-1)\n    y *= 2\n    return z",
        "y = x + 1\n    z = y\n    y *= 2\n    return z",
        "y = x + 1\n    z = y.float()\n    y *= 2\n    return z",  # the same tensor if y is float32
        "y = x + 1\n    y.__imul__(2)\n    return y",
        "y = x + 1\n    z = g(y)\n    y.mul_(2)\n    return z",
        "return F.relu(x, inplace=True)",
        "return F.relu(x, True)",
        "return F.leaky_relu(x, 0.1, True)",
        "return torch.add(x, 1, out=x)",
        "torch.relu_(x)\n    return x",
        "y = [x]\n    y += [x]\n    return y",
        "return [z.mul_(2) for z in x]",
        "y = x + 1\n    z = x and y.mul_(2)\n    return y",
        "y = x + 1\n    z = y.mul_(2) if g else 0\n    return y",
    ],
)
def test_a_change_that_others_may_see_is_refused(body):
    reason = unknown(f"def f(x, g):\n    {body}\n")
    assert any(words in reason for words in ("in place", "changes a value", "writes to a tensor"))


@pytest.mark.parametrize("test", ["if g > 0:", "for _ in range(2):"])
def test_nor_may_it_in_a_branch_or_loop(test):
    helper = f"def h(y, g):\n    {test}\n        y += 1\n    return y\n\n\n"
    assert "in place" in unknown(f"{helper}def f(x, g):\n    y = x * 2\n    z = h(y, g)\n    return y + z\n")


@pytest.mark.parametrize(
    "body",
    [
        "while x:\n        x = x - 1\n    return x",
        "try:\n        y = 1\n    except ValueError:\n        y = 2\n    return y",
        "with open(x) as y:\n        z = y\n    return z",
        "global y\n    y = x\n    return y",
        "def g():\n        return x\n    return g",
        "if x:\n        y = 1\n    return y",
        "for y in x:\n        pass\n    return y",
        "x.flag = 1\n    return x",
        "a, b = (x, x, x)\n    return a",
        "return (y := x) and (z := y) and z",
    ],
)
def test_what_is_not_followed_has_no_form(body):
    found = outcome(f"def f(x):\n    {body}\n")
    assert isinstance(found, Reason)
    assert found.code is Code.NOT_FOLLOWED
    assert found.line > 5


def test_an_async_function_has_no_form():
    import ast

    from veomni_hook.patches.graph import Scope, canonical

    tree = ast.parse("async def f(x):\n    return x\n")
    (function,) = tree.body
    assert isinstance(canonical(function, Scope(tree)), Reason)


BRANCHES = [
    "if c is None:\n        y = x\n    else:\n        y = x * 2\n    return y + 1",
    "y = x\n    if c is not None:\n        y = y * 2\n    return y + 1",
    "y = x if c is None else x * 2\n    return y + 1",
    "y = x\n    if not c is None:\n        y = x * 2\n    else:\n        pass\n    return y + 1",
]


@pytest.mark.parametrize(("one_way", "other_way"), list(itertools.combinations(BRANCHES, 2)))
def test_ways_meet_again(one_way, other_way):
    assert same(f"def f(x, c):\n    {one_way}\n", f"def f(x, c):\n    {other_way}\n")


def test_a_check_is_a_way_that_raises():
    raising = form("def f(x, c):\n    if c:\n        raise ValueError\n    return x\n")
    assert digest(raising) == digest(form("def f(x, c):\n    assert not c\n    return x\n"))
    assert digest(raising) != digest(form(one("x", "x, c")))


def test_effects_are_part_of_the_form():
    quiet = form("def f(x, log):\n    return x * 2\n")
    loud = form("def f(x, log):\n    log(x)\n    return x * 2\n")
    assert not quiet.effects
    assert len(loud.effects) == 1
    assert digest(quiet) != digest(loud)
    pure = form("def f(x, log):\n    torch.exp(x)\n    x.float()\n    return x * 2\n")
    assert digest(pure) == digest(quiet)


def test_what_a_method_sets_it_reads_again():
    found = method_form(
        "class M:\n    def forward(self, x):\n        self.seen = x * 2\n        return self.seen\n"
    )
    assert [effect.op for effect in found.effects] == ["setattr"]
    assert found.result.op == "mul"


def test_an_effect_on_one_way_has_its_test():
    found = method_form(
        "class M:\n    def forward(self, x):\n        if self.on:\n            self.seen = x\n        return x\n"
    )
    assert [effect.op for effect in found.effects] == ["branch"]


def test_a_call_that_draws_is_no_function_of_its_arguments():
    twice = one("F.dropout(x, 0.5) + F.dropout(x, 0.5)")
    once = "def f(x):\n    y = F.dropout(x, 0.5)\n    return y + y\n"
    assert not same(twice, once)
    assert same(one("F.elu(x) + F.elu(x)"), "def f(x):\n    y = F.elu(x)\n    return y + y\n")


def test_contexts():
    plain = "def f(x):\n    y = x * 2\n    return y\n"
    held = "def f(x):\n    with torch.no_grad():\n        y = x * 2\n    return y\n"
    assert not same(plain, held)
    assert same(held, "def f(x):\n    with torch.no_grad():\n        return x * 2\n")
    assert not same(
        held, "def f(x):\n    with torch.autocast('cuda', enabled=False):\n        y = x * 2\n    return y\n"
    )
    mask = "mask = F.one_hot(x, 4).permute(2, 1, 0)"
    assert same(
        f"def f(x):\n    with torch.no_grad():\n        {mask}\n    return mask\n",
        f"def f(x):\n    {mask}\n    return mask\n",
    )
    assert "context" in unknown("def f(x):\n    with x:\n        y = x * 2\n    return y\n")
    # What follows the block runs, too, where the branch does not return.
    sometimes = "with torch.no_grad():\n        if x.any():\n            return x"
    assert "left before its end" in unknown(f"def f(x):\n    {sometimes}\n    return x * 2\n")
    assert not isinstance(outcome(f"def f(x):\n    {sometimes}\n        return x * 2\n"), Reason)


@pytest.mark.parametrize(
    ("line", "times", "reason"), [("y = x + 1", 9000, "long"), ("x = x + 1", 900, "deep")]
)
def test_a_very_long_or_deep_function_is_given_up(line, times, reason):
    body = f"    {line}\n" * times
    found = outcome(f"def f(x):\n{body}    return x\n")
    assert isinstance(found, Reason)
    assert reason in found


def test_a_chain_of_uses_of_one_value_is_cheap():
    body = "\n".join("    x = (x + y * 2) * (x - y.sum())" for _ in range(20))
    assert isinstance(outcome(f"def f(x, y):\n{body}\n    return x.to(y.dtype)\n"), Form)
