"""Attention by segment with torch's fused attention, against upstream's loop and the formula."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from tests.kernels.dispatched import Operators
from tests.kernels.matching import assert_matches
from veomni_hook.kernels.varlen_attention import flash, operand_checks, reference
from veomni_hook.kernels.varlen_attention import torch as ours

LENGTHS = {
    "one": [7], "equal": [4, 4, 4], "different": [3, 5, 1], "mixed": [4, 2, 4, 4, 2], "runs": [4, 4, 2, 2],
    "empty ones": [0, 3, 0, 3, 2, 0], "in turn": [3, 2, 2, 5] * 5,
}  # fmt: skip
OPTIONS: dict[str, Any] = {"attention_mask": None, "scaling": 0.3, "dropout": 0.0, "is_causal": False}
OWNER = SimpleNamespace(is_causal=False, training=True, num_key_value_groups=1)


def operands(lengths: list[int], dtype=torch.float32, heads=2, keys=2, width=8, value_width=8):
    torch.manual_seed(len(lengths))
    total = sum(lengths)
    # As in a tower: positions come first in memory.
    shapes = ((heads, width), (keys, width), (keys, value_width))
    tensors = [torch.randn(total, h, d).to(dtype).transpose(0, 1).unsqueeze(0) for h, d in shapes]
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return tensors, bounds


def side(kernel, bounds, options=OPTIONS):
    return lambda q, k, v: kernel.full(q, k, v, bounds, sdpa_attention_forward, options)


def loop(bounds):
    return lambda q, k, v: upstreams(q, k, v, bounds)


def upstreams(query, key, value, bounds):
    """The loop over segments, as modeling files have it; transformers' function refuses empty segments."""
    lengths = (bounds[1:] - bounds[:-1]).tolist()
    splits = [torch.split(each, lengths, dim=2) for each in (query, key, value)]
    attend = functional.scaled_dot_product_attention
    segments = [attend(*each, scale=OPTIONS["scaling"]) for each in zip(*splits, strict=True)]
    return torch.cat([each.transpose(1, 2) for each in segments], dim=1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_equals_the_loop_over_segments(lengths, dtype):
    tensors, bounds = operands(lengths, dtype)
    assert operand_checks.refuses(OWNER, *tensors, bounds, sdpa_attention_forward, OPTIONS) is None
    assert_matches(side(ours, bounds), loop(bounds), tensors)


@pytest.mark.parametrize("options", [{}, {"scaling": None}, {"scaling": 0.5}])
@pytest.mark.parametrize(("keys", "value_width"), [(4, 8), (2, 8), (1, 8), (4, 6)])
def test_equals_the_formula(keys, value_width, options):
    tensors, bounds = operands([3, 5, 3], heads=4, keys=keys, value_width=value_width)
    assert_matches(*(side(kernel, bounds, options) for kernel in (ours, reference)), tensors)


def test_heads_of_columns_that_are_not_contiguous():
    tensors, bounds = operands([4, 2, 4])
    tensors = [each.transpose(2, 3).contiguous().transpose(2, 3) for each in tensors]
    assert_matches(side(ours, bounds), loop(bounds), tensors)


@pytest.mark.parametrize(
    ("lengths", "number"), [([4, 4, 4, 4], 1), ([4, 4, 2, 3, 3], 3), ([4, 2, 4, 2], 4), ([4, 2] * 6, 2)]
)
def test_calls_are_few_and_boundaries_are_read_once(lengths, number):
    tensors, bounds = operands(lengths)
    operand_checks.lengths_of(bounds)
    for _ in range(2):
        with Operators() as calls:
            ours.full(*tensors, bounds, sdpa_attention_forward, OPTIONS)
            assert operand_checks.refuses(OWNER, *tensors, bounds, sdpa_attention_forward, OPTIONS) is None
        attention = [name for name in calls.names if "attention" in name]
        assert len(attention) == number
        assert "_local_scalar_dense" not in calls.names


def test_boundaries_that_changed_in_place_are_read_again():
    tensors, bounds = operands([4, 2, 3])
    assert operand_checks.lengths_of(bounds) == [4, 2, 3]
    bounds[1] = 5
    assert operand_checks.lengths_of(bounds) == [5, 1, 3]
    found = ours.full(*tensors, bounds, sdpa_attention_forward, OPTIONS)
    torch.testing.assert_close(found, upstreams(*tensors, bounds))


def refusal(*tensors, bounds=None, attention=sdpa_attention_forward, owner=OWNER, **options):
    made, known = operands([4, 2])
    tensors = tensors or tuple(made)
    options = {**OPTIONS, **options}
    return operand_checks.refuses(owner, *tensors, known if bounds is None else bounds, attention, options)


class Owned(torch.Tensor):
    """A subclass, which may do more than compute."""


def test_calls_that_upstream_has_to_run():
    (q, k, v), _ = operands([4, 2])
    wide, _ = operands([4, 2], heads=4, keys=2)
    assert refusal() is None
    assert "not transformers' sdpa" in refusal(attention=functional.scaled_dot_product_attention)
    assert "have a mask" in refusal(attention_mask=torch.ones(1, 1, 6, 6))
    assert "causal" in refusal(is_causal=True)
    assert "causal" in refusal(is_causal=None, owner=SimpleNamespace(training=True))
    assert "dropout (0.1)" in refusal(dropout=0.1)
    assert "softcap is given" in refusal(softcap=30.0)
    assert "output_attentions is given" in refusal(output_attentions=True)
    assert refusal(output_attentions=False, max_length_q=4) is None
    if "position_bias" in inspect.signature(sdpa_attention_forward).parameters:
        assert "position_bias is given" in refusal(position_bias=torch.zeros(1))
    assert "no positions" in refusal(*(each[:, :, :0] for each in (q, k, v)))
    assert "2 sequences" in refusal(*(each.expand(2, -1, -1, -1) for each in (q, k, v)))
    assert "do not fit" in refusal(q, k[:, :, :5], v[:, :, :5])
    assert "other heads" in refusal(*wide)
    assert refusal(*wide, owner=SimpleNamespace(is_causal=False, num_key_value_groups=2)) is None
    assert "different widths" in refusal(q[..., :4], k, v)
    assert "different dtypes" in refusal(q, k, v.double())
    assert "a Owned" in refusal(q.as_subclass(Owned), k, v)
    for wrong in ([0, 4], [0, 4, 7], [0, 7, 6]):
        assert "boundaries" in refusal(bounds=torch.tensor(wrong))


def test_a_replaced_function_of_torch_is_not_skipped(monkeypatch):
    monkeypatch.setattr(functional, "scaled_dot_product_attention", lambda *a, **k: None)
    assert "was replaced" in refusal()


def test_flash_attention_says_what_it_cannot_take():
    (q, k, v), _ = operands([4, 2], torch.bfloat16, width=72, value_width=72)
    assert flash.unfit(None, q, k, v) is None
    assert "half precision" in flash.unfit(None, q.float(), k.float(), v.float())
    assert "one multiple of 8" in flash.unfit(None, q[..., :36], k[..., :36], v[..., :36])
    assert "one multiple of 8" in flash.unfit(None, q, k, v[..., :64])
    strided = q.transpose(2, 3).contiguous().transpose(2, 3)
    assert "not contiguous" in flash.unfit(None, strided, k, v)
