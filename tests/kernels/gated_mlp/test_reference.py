import math

import pytest
import torch
from torch import nn

from veomni_hook.kernels.gated_mlp import reference

LIMIT = 0.75


def scalars(formula, gate, up):
    """Apply a formula on Python floats to every element."""
    values = [formula(g, u) for g, u in zip(gate.flatten().tolist(), up.flatten().tolist(), strict=True)]
    return torch.tensor(values, dtype=torch.float64).view(gate.shape)


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def above(x):
    return min(x, LIMIT)


def beyond(x):
    return max(-LIMIT, min(x, LIMIT))


@pytest.mark.parametrize(
    ("name", "arguments", "formula"),
    [
        ("product", [nn.SiLU()], lambda g, u: g * sigmoid(g) * u),
        ("product_float32", [nn.Tanh()], lambda g, u: math.tanh(g) * u),
        ("clamped", [nn.SiLU(), LIMIT], lambda g, u: above(g) * sigmoid(above(g)) * beyond(u)),
        ("clamped_after", [nn.ReLU(), LIMIT], lambda g, u: above(max(g, 0.0)) * beyond(u)),
        ("scaled_sigmoid", [1.7, LIMIT], lambda g, u: (beyond(u) + 1) * above(g) * sigmoid(1.7 * above(g))),
    ],
)
def test_computes_its_formula(name, arguments, formula):
    gate, up = torch.randn(5, 7) * 2, torch.randn(5, 7) * 2
    found = getattr(reference, name)(gate, up, *arguments)
    torch.testing.assert_close(found.double(), scalars(formula, gate, up), rtol=1e-5, atol=1e-6)


def test_float32_rounds_once():
    gate, up = torch.randn(64).bfloat16(), torch.randn(64).bfloat16()
    found = reference.product_float32(gate, up, nn.functional.silu)
    assert torch.equal(found, (nn.functional.silu(gate.float()) * up.float()).bfloat16())
    assert not torch.equal(found, reference.product(gate, up, nn.functional.silu))
