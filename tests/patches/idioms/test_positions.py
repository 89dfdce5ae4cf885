"""The domain of positions alone: ten lines of code, and what is known of their result."""

from textwrap import dedent, indent

import pytest

from veomni_hook.patches.code.document import Document
from veomni_hook.patches.idioms.layer_loop.positions import Positions
from veomni_hook.patches.idioms.layer_loop.values import (
    BATCH,
    PLAIN,
    POSITIONS,
    Items,
    Maybe,
    Module,
    Plain,
    Tensor,
    Whole,
)
from veomni_hook.patches.interpreter.domain import Frame
from veomni_hook.patches.interpreter.walk import run
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Missed

FILE = """
import torch
from torch import nn

def doubled(x, times=2):
    return x * times

def first(x):
    return x[:, 0]

class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return self.weight * self.linear(x)

class Double(Norm):
    def forward(self, x):
        return super().forward(x) * 2

class Layer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.norm = Double(config.width)

    def forward(self, x, mask, flag=None):
{body}
"""
X = Tensor(((BATCH,), (POSITIONS,), ("width",)))


def followed(body):
    """What a body returns, with B for the batch, S for positions, . for other sizes."""
    text = FILE.format(body=indent(dedent(body).strip(), " " * 8))
    view = ModuleView(Document(text, "tiny"))
    forward = view.methods(view.classes["Layer"])["forward"]
    values = {"self": Module(("Layer",)), "x": X, "mask": Whole("mask"), "flag": PLAIN}
    frame = Frame(Positions(view), values)
    result = run(forward.body, frame)
    return shown(result)


def shown(value):
    if isinstance(value, Tensor):
        return " ".join("".join(f for f in dim if f in "BS") or ("." if dim else "1") for dim in value.dims)
    if isinstance(value, Items):
        return ", ".join(map(shown, value.values))
    if isinstance(value, Maybe):
        return f"{shown(value.value)} or None"
    return "plain" if isinstance(value, Plain) else type(value).__name__


@pytest.mark.parametrize(
    ("body", "result"),
    [
        ("return x.transpose(1, 2)", "B . S"),
        ("return x.view(*x.shape[:-1], -1, 4).transpose(1, 2)", "B . S ."),
        ("return x.reshape(-1, x.shape[-1])", "BS ."),
        ("return x.sum(-1, keepdim=True)", "B S 1"),
        ("return torch.cat([x, x], dim=-1).chunk(2, -1)[0]", "B S ."),
        ("return x[..., None, :].squeeze(-2)", "B S ."),
        ("return x.topk(2, dim=-1)", "B S ., B S ."),
        ("return x @ self.norm.weight", "B S ."),
        ("return self.norm(x)", "B S ."),
        ("return doubled(x, times=3)", "B S ."),
        ("if flag:\n    y = x\nelse:\n    y = x * 2\nreturn y", "B S ."),
        ("y = None\nif flag:\n    y = x\nreturn y", "B S . or None"),
        ("if flag:\n    return x\nreturn x.transpose(0, 1)", "Unknown"),
        ("if flag:\n    raise ValueError(x.shape[1])\nreturn x", "B S ."),
        ("if flag is not None and flag:\n    y = x\nelse:\n    raise ValueError\nreturn y", "B S ."),
        ("for _ in range(3):\n    x = x + 1\nreturn x", "B S ."),
        ("for f in (1, 2):\n    if flag:\n        continue\n    x = x * f\nreturn x", "B S ."),
        ("for f in range(9):\n    if flag:\n        break\n    x = x * f\nreturn x", "B S ."),
        ("assert x.shape[1] == 4\nreturn x", "B S ."),
        ("return (y := x * 2) + y", "B S ."),
        ("pass", "NoneType"),
    ],
)
def test_what_is_known_of_a_result(body, result):
    assert followed(body) == result


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("return x.softmax(1)", "a softmax along the positions"),
        ("return x.mean()", "a mean over all dimensions"),
        ("return first(x)", "first: it picks positions by an index"),
        ("return x[:, :4]", "it takes a part of the positions"),
        ("return x.transpose(1, 2) @ x", "a matrix product sums over positions"),
        ("return x @ x.transpose(1, 2)", "every position is multiplied with every other one"),
        ("return x * x.shape[1]", "it computes with the number of positions"),
        ("return torch.rand(3)", "it draws random numbers"),
        ("return x.frobenius()", "it calls frobenius, which may mix positions"),
        ("if x.sum(-1) > 0:\n    x = x * 2\nreturn x", "a branch depends on values of some positions"),
        ("while flag:\n    x = x * 2\nreturn x", "While is not followed"),
        ("for row in x:\n    flag = row\nreturn x", "a loop over positions"),
        ("for f in (1, 2):\n    if flag:\n        return x\nreturn x", "a loop is left before its end"),
        ("self.kept = x", "it keeps a value beyond the call"),
        (
            "y = None\nif flag:\n    y = 3\nif y is None:\n    x = x.softmax(1)\nreturn x",
            "a softmax along the positions",
        ),
        ("y = torch.zeros(3)\ny[0] = x\nreturn y", "it writes to a part of a value"),
        ("return flag and (z := x)", "an expression that runs only in some cases changes a value"),
    ],
)
def test_what_cannot_be_split_says_why_and_where(body, reason):
    with pytest.raises(Missed, match=reason) as error:
        followed(body)
    assert "(line " in str(error.value)


def test_functions_that_were_followed_are_named():
    text = FILE.format(body="        return doubled(self.norm(x))")
    view = ModuleView(Document(text, "tiny"))
    positions = Positions(view)
    forward = view.methods(view.classes["Layer"])["forward"]
    run(forward.body, Frame(positions, {"self": Module(("Layer",)), "x": X}))
    assert list(positions.followed) == ["Double.forward", "Norm.forward", "doubled"]
