import pytest
import torch

from tests.kernels.matching import assert_matches
from veomni_hook.kernels.load_balancing_loss import spellings
from veomni_hook.kernels.load_balancing_loss.reference import softmax_topk

PADDED = torch.ones(2, 9, dtype=torch.int64)
PADDED[0, 6:] = 0


@pytest.mark.parametrize("name", spellings.__all__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mask", [None, PADDED], ids=["none", "padding"])
def test_is_the_reference(name, dtype, mask):
    spelling = getattr(spellings, name)

    def ours(*logits):
        return spelling(logits, 5, 2, mask)

    def reference(*logits):
        return softmax_topk(logits, 5, 2, mask)

    assert_matches(ours, reference, [torch.randn(18, 5).to(dtype) for _ in range(3)])


@pytest.mark.parametrize("name", spellings.__all__)
def test_zero_without_a_tuple(name):
    assert getattr(spellings, name)(None, 5) == getattr(spellings, name)([torch.randn(18, 5)], 5) == 0
