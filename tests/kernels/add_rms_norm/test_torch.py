from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.kernels import declared
from tests.kernels.matching import assert_matches
from veomni_hook.kernels.add_rms_norm.variants import OP

EPS = 1e-3


def pair(variant):
    return [partial(each, eps=EPS) for each in declared.pair("add_rms_norm", variant, "torch")]


def inputs(shape, dtype, weight_dtype=None):
    return [*(torch.randn(shape).to(dtype) for _ in "ab"), torch.rand(shape[-1]).to(weight_dtype or dtype)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [(3, 5, 7), (2, 0, 8), (1, 3), (129, 33)])
@pytest.mark.parametrize("variant", OP.variants)
def test_equals_the_reference(variant, shape, dtype):
    for weight_dtype in (None, torch.float32):
        assert_matches(*pair(variant), inputs(shape, dtype, weight_dtype))


@pytest.mark.parametrize("variant", OP.variants)
def test_strides_promotion_and_tracing(variant):
    ours, upstream = pair(variant)
    residual, hidden, weight = inputs((6, 4, 10), torch.float32)
    given = [residual.transpose(0, 1).contiguous().transpose(0, 1), hidden.bfloat16(), weight]
    assert_matches(ours, upstream, given)
    assert_matches(ours, upstream, [residual, hidden[:1], weight])
    torch.compiler.reset()
    assert_matches(torch.compile(ours, backend="aot_eager", fullgraph=True), upstream, given)


@pytest.mark.parametrize("used", [0, 1])
def test_one_of_both_results_is_used(used):
    given = inputs((5, 8), torch.float32)
    found = []
    for function in pair("one_plus_weight"):
        leaves = [each.clone().requires_grad_() for each in given]
        function(*leaves)[used].square().sum().backward()
        found.append([leaf.grad for leaf in leaves])
    for ours, truth in zip(*found, strict=True):
        assert (ours is None and truth is None) or torch.equal(ours, truth)
