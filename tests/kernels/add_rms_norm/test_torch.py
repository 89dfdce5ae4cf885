from functools import partial

import pytest
import torch

from tests.kernels import declared
from tests.kernels.matching import assert_matches

EPS = 1e-3


def pair(variant):
    return [partial(each, eps=EPS) for each in declared.pair("add_rms_norm", variant, "torch")]


@pytest.mark.parametrize("used", [0, 1])
def test_one_of_both_results_is_used(used):
    sides = (lambda *given, f=f: f(*given)[used] for f in pair("one_plus_weight"))
    assert_matches(*sides, [torch.randn(5, 8), torch.randn(5, 8), torch.rand(8)], exact=True)
