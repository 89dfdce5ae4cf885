"""Attention by segment with torch_npu's operator, on its double: equality with upstream's loop, and refusals."""

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from tests.kernels.matching import assert_matches
from tests.kernels.varlen_attention.test_torch import LENGTHS, OPTIONS, OWNER, loop, operands, side
from veomni_hook.kernels.varlen_attention import npu, reference

pytestmark = pytest.mark.usefixtures("operators")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_equals_the_loop_over_segments(lengths, dtype):
    tensors, bounds = operands(lengths, dtype)
    assert npu.refuses(OWNER, *tensors, bounds, sdpa_attention_forward, OPTIONS) is None
    assert_matches(side(npu, bounds), loop(bounds), tensors)


@pytest.mark.parametrize("options", [{}, {"scaling": None}, {"scaling": 0.5}])
@pytest.mark.parametrize("keys", [4, 2, 1])
def test_shared_heads_and_scales(keys, options):
    tensors, bounds = operands([3, 5, 3], heads=4, keys=keys)
    assert_matches(*(side(kernel, bounds, options) for kernel in (npu, reference)), tensors)


def test_one_operator_each_way_and_only_the_gradients_that_are_wanted(called):
    tensors, bounds = operands([3, 4])
    query = tensors[0].requires_grad_()
    side(npu, bounds)(*tensors).sum().backward()
    assert called == ["npu_fusion_attention", "npu_fusion_attention_grad"]
    assert query.grad is not None and tensors[1].grad is None


def refusal(tensors, bounds):
    return npu.refuses(OWNER, *tensors, bounds, sdpa_attention_forward, OPTIONS)


def test_what_the_operator_does_not_take():
    assert "float64" in refusal(*operands([3, 2], torch.float64))
    assert "different widths" in refusal(*operands([3, 2], width=8, value_width=4))
    assert refusal(*operands([1] * 1024)) is None
    assert "1025 segments" in refusal(*operands([1] * 1025))
    assert "heads of 776" in refusal(*operands([2], width=776, value_width=776))
    assert "257 heads" in refusal(*operands([2], heads=257, keys=257))
