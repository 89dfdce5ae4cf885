import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.kernels.matching import assert_matches, close
from veomni_hook.kernels.linear_cross_entropy import reference
from veomni_hook.kernels.linear_cross_entropy import torch as chunked
from veomni_hook.kernels.linear_cross_entropy.objective import IDENTITY, NOTHING, Objective, Transform

TRANSFORMS = {
    "nothing": IDENTITY,
    "scale": Transform(scale=0.3),
    "divisor": Transform(divisor=7.0),
    "soft cap": Transform(softcap=0.8),
    "all": Transform(dtype=torch.float32, scale=2.5, divisor=1.5, softcap=1.2),
}


def upstream_logits(logits, transform):
    """Step by step, as models write it."""
    if transform.dtype is not None:
        logits = logits.to(transform.dtype)
    logits = logits if transform.scale is None else logits * transform.scale
    logits = logits if transform.divisor is None else logits / transform.divisor
    if transform.softcap is not None:
        logits = logits / transform.softcap
        logits = torch.tanh(logits)
        logits = logits * transform.softcap
    return logits


def operands(dtype):
    target = torch.randint(0, 101, (37,))
    target[:11] = -100
    return [
        torch.randn(37, 16).to(dtype),
        (torch.randn(101, 16) * 0.3).to(dtype),
        torch.randn(101).to(dtype),
    ], target


def loss_of(transform, target, num_items=None):
    def run(x, weight, bias):
        logits = upstream_logits(functional.linear(x, weight, bias), transform).float()
        total = functional.cross_entropy(logits, target, reduction="sum")
        return total / ((target != -100).sum() if num_items is None else num_items)

    return run


@pytest.mark.parametrize("name", TRANSFORMS)
def test_logits_are_upstreams_bit_for_bit(name):
    logits = torch.randn(4, 9).bfloat16()
    expected = upstream_logits(logits, TRANSFORMS[name])
    got = TRANSFORMS[name](logits)
    assert torch.equal(got, expected) and got.dtype is expected.dtype


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_items", [None, 5])
def test_losses_and_gradients_are_upstreams(name, dtype, num_items):
    given, target = operands(dtype)
    options = {"transform": TRANSFORMS[name], "num_items": num_items}
    truth = loss_of(TRANSFORMS[name], target, num_items)
    assert_matches(lambda *x: reference.linear_cross_entropy(*x, target, **options), truth, given)


def test_large_logits_are_capped():
    given = [torch.full((2, 1), 1e4), torch.ones(3, 1), torch.zeros(3)]
    objective = Objective(transform=Transform(softcap=30.0))
    loss, _ = chunked.loss_and_statistics(*given, torch.tensor([0, 1]), objective, NOTHING)
    close(loss, torch.tensor(3.0).log(), 1e-6)


@pytest.mark.parametrize(
    ("transform", "reason"),
    [
        (Transform(scale=nn.Parameter(torch.ones(()))), "scale of the logits is a Parameter"),
        (Transform(softcap="2"), "softcap of the logits is a str"),
        (Transform(dtype=torch.int64), "cast to torch.int64"),
        (Transform(dtype=torch.bfloat16, scale=2, divisor=3.0, softcap=None), None),
    ],
)
def test_refuses_what_is_no_number(transform, reason):
    found = transform.refuses()
    assert found is None if reason is None else reason in found
