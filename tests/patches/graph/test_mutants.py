"""A changed function has another form or computes the same bits: every small change, and pairs of changes."""

import ast
import random
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

from tests.patches.graph.mutants import mutants
from veomni_hook.patches.graph import Form, Scope, canonical, digest

BODIES = {
    "norm": """
def f(self, x, gate):
    dtype = x.dtype
    y = x.to(torch.float32)
    scale = y.pow(2).mean(-1, keepdim=True)
    y = y * torch.rsqrt(scale + self.eps)
    return self.weight * y.to(dtype)
""",
    "shifted": """
def f(self, x, gate):
    y = x.float()
    y = y * torch.pow((y ** 2).mean(-1, keepdim=True) + self.eps, -0.5)
    y = y * (1.0 + self.weight.float())
    return y.type_as(x)
""",
    "gated": """
def f(self, x, gate=None):
    y = x.float()
    if gate is not None:
        y = y * F.silu(gate.float())
    y = y / (y.square().mean(-1, keepdim=True) + self.eps).sqrt()
    return self.weight * y.to(x.dtype)
""",
    "halves": """
def f(self, x, gate):
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    turned = torch.cat((-x2, x1), dim=-1)
    return x * gate + turned * self.weight
""",
    "pairs": """
def f(self, x, gate):
    even, odd = x[..., 0::2], x[..., 1::2]
    turned = torch.stack((-odd, even), dim=-1).flatten(-2)
    cos = gate.unsqueeze(1)[:, 0].float()
    return (x.float() * cos + turned.float() * self.weight).to(x.dtype)
""",
    "clamped": """
def f(self, x, gate):
    a, b = torch.cat((x, gate), -1).chunk(2, dim=-1)
    a = a.clamp(max=0.5)
    b = b.clamp(min=-0.5, max=0.5)
    b += 1
    return a * torch.sigmoid(a * 1.702) * b
""",
    "early": """
def f(self, x, gate):
    if self.eps is None:
        return x
    y = x * 2 if self.flag else x - gate
    y *= gate
    return y - x.mean(-1, keepdim=True)
""",
    "loop": """
def f(self, x, gate):
    total = torch.zeros_like(x)
    for row in self.ids:
        if row == 1:
            continue
        part = x[row] * gate[row]
        total.index_add_(0, self.ids, part.unsqueeze(0).expand(2, -1))
    return total - x
""",
}


def parsed(text):
    (function,) = ast.parse(text).body
    return function


def form_of(function):
    header = ast.parse("import torch\nimport torch.nn.functional as F\nclass M: pass\n")
    owner = header.body[-1]
    owner.body = [function]
    found = canonical(function, Scope(header), owner)
    return digest(found) if isinstance(found, Form) else None


def results(function):
    """The function's results for several inputs and the inputs afterwards, or the type of an error."""
    space = {"torch": torch, "F": functional}
    exec(compile(ast.Module([function], []), "<mutant>", "exec"), space)
    found: list[object] = []
    for dtype, weight_dtype, flag in [
        (torch.float32, torch.float32, True),
        (torch.bfloat16, torch.bfloat16, False),
        (torch.bfloat16, torch.float32, True),
    ]:
        torch.manual_seed(5)
        x, gate, weight = (torch.randn(4, 8) for _ in range(3))
        x, gate, weight = x.to(dtype), gate.to(dtype), weight[0].to(weight_dtype)
        owner = SimpleNamespace(eps=0.25, weight=weight, flag=flag, ids=torch.tensor([0, 2]))
        try:
            made = space["f"](owner, x, gate)
        except Exception as error:
            made = type(error).__name__
        found += [made, x, gate, weight]
    return found


def same(one, other):
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(
            one.nan_to_num(7), other.nan_to_num(7)
        )
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and not isinstance(one, torch.Tensor) and one == other


def check(function, expected, truth):
    """Whether the form differs; if it does not, check that the results are equal."""
    form = form_of(function)
    if form != expected:
        return True
    assert same(results(function), truth), ast.unparse(function)
    return False


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", BODIES)
def test_every_small_change(name):
    function = parsed(BODIES[name])
    expected, truth = form_of(function), results(function)
    assert expected is not None
    assert not isinstance(truth[0], str), truth[0]
    told = [check(mutant, expected, truth) for mutant in mutants(function)]
    assert len(told) > 50
    # Nearly all mutants change the form; the rest swap operands or do something similar.
    assert sum(told) > 0.8 * len(told)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", BODIES)
def test_pairs_of_changes(name):
    function = parsed(BODIES[name])
    expected, truth = form_of(function), results(function)
    assert expected is not None
    draw = random.Random(3)
    for mutant in draw.sample(list(mutants(function)), 8):
        for second in draw.sample(list(mutants(mutant)), 10):
            check(second, expected, truth)
