"""Attention for some heads at a time."""

import pytest
import torch
from torch import nn

from veomni_hook.memory import heads
from veomni_hook.memory.heads import by_heads

BATCH, LENGTH, SIZE = 2, 24, 8


def attention(module, query, key, value, mask=None, *, calls, scaling=None, **_):
    calls.append(query.shape[1])
    output = nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=True
    )
    return output.transpose(1, 2).contiguous(), None


def operands(number=8, of_keys=4):
    shapes = [(BATCH, heads_, LENGTH, SIZE) for heads_ in (number, of_keys, of_keys)]
    made = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=made, dtype=torch.float64, requires_grad=True) for shape in shapes]


def joined(*outputs):
    return torch.cat(outputs, 2)


def run(module=None, *others, calls, **named):
    """The output and every gradient."""
    tensors = operands()
    output, weights = by_heads(
        attention, joined, module or nn.Module(), *tensors, *others, calls=calls, **named
    )
    assert weights is None
    return [output, *torch.autograd.grad(output.square().sum(), tensors)]


@pytest.mark.parametrize(("most", "parts"), [(48, 1), (24, 2), (16, 2), (12, 4), (1, 4)])
@pytest.mark.parametrize("masked", [False, True])
def test_the_same_numbers(monkeypatch, most, parts, masked):
    mask = torch.ones(BATCH, 1, LENGTH, LENGTH, dtype=torch.bool).tril() if masked else None
    expected = run(None, mask, calls=[], scaling=0.3, count=torch.tensor(5.0))
    monkeypatch.setattr(heads, "ROWS", most)
    calls = []
    found = run(None, mask, calls=calls, scaling=0.3, count=torch.tensor(5.0))
    assert calls == [8 // parts] * parts
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def with_sinks():
    module = nn.Module()
    module.sinks = nn.Parameter(torch.zeros(8))
    return module


@pytest.mark.parametrize(
    ("module", "others", "named"),
    [
        (with_sinks(), (), {}),
        (None, (), {"sinks": torch.zeros(8)}),
        (None, (torch.zeros(BATCH, 8, LENGTH, LENGTH, dtype=torch.float64),), {}),
        (None, (), {"dropout": 0.1}),
    ],
)
def test_what_differs_by_head_runs_at_once(monkeypatch, module, others, named):
    monkeypatch.setattr(heads, "ROWS", 1)
    run(module, *others, calls=(calls := []), **named)
    assert calls == [8]
