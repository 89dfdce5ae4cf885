"""Loops: carried values, and what a form does not depend on."""

import pytest

from tests.patches.graph.code import form, outcome, same
from veomni_hook.patches.graph import digest
from veomni_hook.patches.reasons import Reason

SUM = """
def f(xs, w):
    total = torch.zeros_like(w)
    for x in xs:
        y = x * w
        total.add_(y)
    return total
"""


@pytest.mark.parametrize(
    "other",
    [
        SUM.replace("total.add_(y)", "total += y"),
        SUM.replace("total.add_(y)", "total = (total + y).to(total.dtype)"),
        SUM.replace("y = x * w", "z = w * x").replace("total.add_(y)", "total.add_(z)"),
        SUM.replace("total", "accumulated").replace("xs", "many"),
        SUM.replace("    total = ", "    unused = 0\n    total = ").replace(
            "        y", "        unused = unused + 1\n        y"
        ),
        SUM.replace("    total = ", "    for z in w:\n        pass\n    total = "),
    ],
)
def test_one_loop(other):
    assert same(SUM, other)


@pytest.mark.parametrize(
    "other",
    [
        SUM.replace("x * w", "x + w"),
        SUM.replace("zeros_like", "ones_like"),
        SUM.replace("in xs", "in xs[1:]"),
        SUM.replace("total.add_(y)", "total.sub_(y)"),
        SUM.replace("total.add_(y)", "total = y"),
        SUM.replace("        y =", "        if x is None:\n            continue\n        y ="),
        SUM.replace("total.add_(y)", "total.add_(y * total)"),
    ],
)
def test_another_loop(other):
    assert not same(SUM, other)


def test_a_skipped_round_is_a_way():
    skipping = SUM.replace("        y =", "        if x is None:\n            continue\n        y =")
    guarded = SUM.replace("        total.add_(y)", "        if x is not None:\n            total.add_(y)")
    assert same(skipping, guarded)


def test_values_that_depend_on_each_other_are_carried_together():
    text = "def f(n, a, b):\n    for _ in range(n):\n        a, b = b, a + b\n    return a\n"
    found = form(text).result
    assert (found.op, len(found.args)) == ("loop", 5)
    assert not same(text, text.replace("return a", "return b"))


@pytest.mark.parametrize(
    "body",
    [
        "for x in xs:\n        if x is None:\n            break\n        total += x",
        "for x in xs:\n        return x",
        "for x in xs:\n        total += x\n    else:\n        total += 1",
        "for x in xs:\n        self.seen = x",
        "for x in xs:\n        w += x",
        "for x in xs:\n        other = total\n        total += x",
        "old = w\n    for x in xs:\n        total += x\n        total = old",
    ],
)
def test_loops_that_are_not_followed(body):
    text = f"def f(self, xs, w):\n    total = torch.zeros_like(w)\n    {body}\n    return total\n"
    assert isinstance(outcome(text), Reason)


EXPERTS = """
class M(nn.Module):
    def act(self, both):
        gate, up = both.chunk(2, dim=-1)
        return F.silu(gate) * up

    def forward(self, states, ids, weights):
        out = torch.zeros_like(states)
        with torch.no_grad():
            mask = F.one_hot(ids, num_classes=self.count).permute(2, 1, 0)
            hit = (mask.sum(dim=(-1, -2)) > 0).nonzero()
        for expert in hit:
            expert = expert[0]
            place, token = torch.where(mask[expert])
            done = F.linear(self.act(F.linear(states[token], self.up[expert])), self.down[expert])
            out.index_add_(0, token, (done * weights[token, place, None]).to(out.dtype))
        return out
"""


def test_a_loop_over_experts():
    from tests.patches.graph.code import method_form

    first = digest(method_form(EXPERTS))
    spelt = (
        EXPERTS.replace("        with torch.no_grad():\n", "")
        .replace("            mask =", "        mask =")
        .replace("            hit =", "        hit =")
        .replace("(mask.sum(dim=(-1, -2)) > 0)", "torch.greater(mask.sum(dim=(-1, -2)), 0)")
        .replace("self.act(", "self.gated(")
        .replace("def act(", "def gated(")
    )
    assert digest(method_form(spelt)) == first
    for old, new in [
        ("weights[token, place, None]", "weights[place, token, None]"),
        ("num_classes=self.count", "num_classes=self.count + 1"),
        ("F.silu(gate) * up", "F.silu(up) * gate"),
        ("out.index_add_(0, token", "out.index_add_(0, place"),
        (
            "            expert = expert[0]",
            "            expert = expert[0]\n            if expert == self.count:\n                continue",
        ),
    ]:
        assert digest(method_form(EXPERTS.replace(old, new))) != first, new
