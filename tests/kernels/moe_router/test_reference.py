import math

import pytest
import torch

from veomni_hook.kernels.moe_router import reference
from veomni_hook.kernels.moe_router import torch as in_torch

TOKENS, EXPERTS = 33, 8


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def softmax(values):
    powers = [math.exp(value) for value in values]
    return [power / sum(powers) for power in powers]


def largest(values, count):
    return sorted(range(len(values)), key=lambda index: -values[index])[:count]


def assert_routes(found, expected):
    """Compare ``found`` with a list of ``{expert: weight}``, whatever the order of a token's experts."""
    weights, indices = found
    assert weights.shape == indices.shape
    for row, token in enumerate(expected):
        got = dict(zip(indices[row].tolist(), weights[row].tolist(), strict=True))
        assert got == pytest.approx(token, rel=1e-5)


@pytest.mark.parametrize("normalise", [True, False])
def test_softmax_topk(normalise):
    logits = torch.randn(TOKENS, EXPERTS)
    expected = []
    for row in logits.tolist():
        probabilities = softmax(row)
        chosen = largest(probabilities, 3)
        total = sum(probabilities[index] for index in chosen) if normalise else 1.0
        expected.append({index: probabilities[index] / total for index in chosen})
    assert_routes(reference.softmax_topk(logits, 3, normalise), expected)


def test_softmax_topk_computes_in_float32():
    weights, _ = reference.softmax_topk(torch.randn(4, EXPERTS).bfloat16(), 2, True)
    assert weights.dtype is torch.float32


def test_topk_softmax_keeps_the_dtype():
    logits = torch.randn(TOKENS, EXPERTS)
    expected = []
    for row in logits.tolist():
        chosen = largest(row, 3)
        expected.append(dict(zip(chosen, softmax([row[index] for index in chosen]), strict=True)))
    assert_routes(reference.topk_softmax(logits, 3), expected)
    assert reference.topk_softmax(logits.bfloat16(), 3)[0].dtype is torch.bfloat16


def test_the_bias_chooses_and_does_not_weigh():
    logits, bias = torch.randn(TOKENS, EXPERTS), torch.randn(EXPERTS)
    expected = []
    for row in logits.tolist():
        scores = [sigmoid(value) for value in row]
        chosen = largest([score + more for score, more in zip(scores, bias.tolist(), strict=True)], 3)
        total = sum(scores[index] for index in chosen) + 0.25
        expected.append({index: scores[index] / total for index in chosen})
    assert_routes(reference.of("biased_topk")(logits, bias, 3, torch.sigmoid, 0.25, False), expected)


@pytest.mark.parametrize("normalise", [True, False])
def test_grouped_topk_stays_in_the_best_groups(normalise):
    logits, bias = torch.randn(TOKENS, EXPERTS), torch.randn(EXPERTS) * 0.1
    found = reference.of("grouped_topk")(logits, bias, 3, EXPERTS, 4, 2, normalise, -math.inf, False)
    expected = []
    for row in logits.tolist():
        scores = [sigmoid(value) for value in row]
        biased = [score + more for score, more in zip(scores, bias.tolist(), strict=True)]
        groups = [sum(sorted(biased[start : start + 2])[-2:]) for start in range(0, EXPERTS, 2)]
        best = largest(groups, 2)
        allowed = [value if index // 2 in best else -math.inf for index, value in enumerate(biased)]
        chosen = largest(allowed, 3)
        total = sum(scores[index] for index in chosen) + 1e-20 if normalise else 1.0
        expected.append({index: scores[index] / total for index in chosen})
    assert_routes(found, expected)


def test_what_the_other_groups_count_as_matters():
    logits = torch.tensor([[4.0, 3.0, -4.0, -4.0]])
    bias = torch.tensor([0.0, 0.0, -2.0, -2.0])
    # Within the good group even a negative choice is better than minus infinity, and worse than zero.
    bias = bias - 3.0
    kept = reference.of("grouped_topk")(logits, bias, 2, 4, 2, 1, False, -math.inf, True)[1]
    lost = reference.of("grouped_topk")(logits, bias, 2, 4, 2, 1, False, 0.0, True)[1]
    assert kept.tolist() == [[0, 1]]
    assert sorted(lost.tolist()[0]) == [2, 3]


@pytest.mark.parametrize("name", ["biased_topk", "grouped_topk"])
def test_a_number_may_stand_for_the_bias(name):
    logits = torch.randn(5, 8)
    others = {"biased_topk": (3, torch.sigmoid, 1e-20, True), "grouped_topk": (3, 8, 4, 2, True, 0.0, True)}[
        name
    ]
    for function in (reference.of(name), in_torch.kernel(name)):
        got = function(logits, 0.5, *others)
        expected = reference.of(name)(logits, torch.full((8,), 0.5), *others)
        torch.testing.assert_close(got, expected)
