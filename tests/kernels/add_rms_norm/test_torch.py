from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.kernels import declared

EPS = 1e-3


def pair(variant):
    return [partial(each, eps=EPS) for each in declared.pair("add_rms_norm", variant, "torch")]


def inputs(shape, dtype, weight_dtype=None):
    return [*(torch.randn(shape).to(dtype) for _ in "ab"), torch.rand(shape[-1]).to(weight_dtype or dtype)]


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
