import math

import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func as upstream

from tests.kernels.matching import assert_matches
from veomni_hook.kernels.load_balancing_loss.reference import softmax_topk, softmax_topk_in_dtype

BATCH, LENGTH, EXPERTS, TOP_K = 2, 9, 5, 2


def layers(count=3, dtype=torch.float32):
    return tuple(torch.randn(BATCH * LENGTH, EXPERTS).to(dtype) for _ in range(count))


def masks():
    padded = torch.ones(BATCH, LENGTH, dtype=torch.int64)
    padded[0, 6:] = 0
    return [None, padded, padded.bool()]


@pytest.mark.parametrize("function", [softmax_topk, softmax_topk_in_dtype])
@pytest.mark.parametrize("mask", masks(), ids=["none", "padding", "bool"])
def test_by_counting(mask, function):
    given = layers()
    kept = [1] * (BATCH * LENGTH) if mask is None else mask.flatten().int().tolist()
    share, probability, tokens = [0.0] * EXPERTS, [0.0] * EXPERTS, 0
    for layer in given:
        for row, wanted in zip(layer.tolist(), kept, strict=True):
            if not wanted:
                continue
            tokens += 1
            powers = [math.exp(value) for value in row]
            for index in sorted(range(EXPERTS), key=lambda index: -row[index])[:TOP_K]:
                share[index] += 1
            for index in range(EXPERTS):
                probability[index] += powers[index] / sum(powers)
    expected = EXPERTS * sum(s * p for s, p in zip(share, probability, strict=True)) / tokens**2
    assert function(given, EXPERTS, TOP_K, mask).item() == pytest.approx(expected, rel=1e-5)


def test_the_means_of_one_are_rounded():
    given = tuple(layer * 3 for layer in layers(dtype=torch.bfloat16))
    assert softmax_topk(given, EXPERTS) != softmax_topk_in_dtype(given, EXPERTS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mask", masks(), ids=["none", "padding", "bool"])
def test_is_the_installed_releases_loss(mask, dtype):
    def ours(*logits):
        return softmax_topk(logits, EXPERTS, TOP_K, mask)

    def theirs(*logits):
        return upstream(logits, EXPERTS, TOP_K, mask)

    # Up to some release upstream's is the other variant, whose means are rounded.
    assert_matches(ours, theirs, layers(dtype=dtype), tolerance=0.06 if dtype is torch.bfloat16 else None)


@pytest.mark.parametrize("nothing", [None, [], list(layers())], ids=["none", "no list", "a list"])
def test_zero_without_a_tuple(nothing):
    assert softmax_topk(nothing, EXPERTS) == upstream(nothing, EXPERTS) == 0
