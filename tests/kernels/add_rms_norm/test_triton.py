"""The fused addition and RMSNorm against its reference, through the interpreter or compiled."""

from functools import partial

import pytest
import torch
from torch import nn

from tests.kernels import declared
from tests.kernels.batches import assert_batch_invariant
from tests.kernels.declared import refusal
from tests.kernels.matching import DEVICE, assert_matches
from tests.kernels.rms_norm.variants import DTYPES, wide
from veomni_hook.kernels.add_rms_norm.variants import OP

pytest.importorskip("triton")

from veomni_hook.kernels.rms_norm import tiles

EPS = 1e-3
VARIANTS = sorted(OP.variants)

refuses = refusal("add_rms_norm", "cast_before_weight", "triton")


def pair(variant):
    return [partial(each, eps=EPS) for each in declared.pair("add_rms_norm", variant, "triton")]


def inputs(shape, dtype=torch.float32, weight_dtype=None):
    weight = torch.rand(shape[-1]) + 0.5
    return [*(torch.randn(shape).to(DEVICE, dtype) for _ in "ab"), weight.to(DEVICE, weight_dtype or dtype)]


@pytest.mark.parametrize(("variant", "dtype"), wide(VARIANTS), ids=str)
def test_wide_rows(variant, dtype):
    assert_matches(*pair(variant), inputs((3, 4100), dtype))


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [23, 40])
@pytest.mark.parametrize("variant", ["cast_before_weight", "one_plus_weight"])
def test_parts_equal_the_reference(in_parts, variant, columns, dtype):
    assert tiles.wide(columns, 4, fetched=False)
    assert_matches(*pair(variant), inputs((7, columns), dtype))


@pytest.mark.sample(8)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [17, 23, 40])
@pytest.mark.parametrize("variant", VARIANTS)
def test_two_blocks_equal_the_reference(split_early, variant, columns, dtype):
    assert tiles.split(columns)[1]
    assert_matches(*pair(variant), inputs((67, columns), dtype))


@pytest.mark.sample(2)
@pytest.mark.parametrize("weight_dtype", [torch.float32, None], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_sum_has_upstreams_bits_and_casts_stand_where_upstreams_do(variant, weight_dtype):
    # The interpreter cuts bfloat16 off.
    given = inputs((257, 96), torch.bfloat16 if DEVICE == "cuda" else torch.float16, weight_dtype)
    (found_sum, found), (true_sum, truth) = (run(*given) for run in pair(variant))
    assert torch.equal(found_sum, true_sum)
    assert (~torch.isclose(found.float(), truth.float(), rtol=2e-6, atol=0)).float().mean() < 0.01


def test_only_the_norm_is_used():
    turned = [lambda *given, run=run: run(*given)[1] for run in pair("one_plus_weight_rounded")]
    assert_matches(*turned, inputs((4, 9)))


def test_only_the_sum_is_used():
    ours, _ = pair("one_plus_weight_rounded")
    a, b, weight = (x.requires_grad_() for x in inputs((4, 9)))
    ours(a, b, weight)[0].square().sum().backward()
    torch.testing.assert_close(a.grad, 2 * (a + b).detach())
    assert torch.equal(a.grad, b.grad) and weight.grad is None


def test_one_tensor_is_the_gradient_of_both_and_stays_right():
    """Two leaves get one tensor, and what is accumulated into the one does not show in the other."""
    results = []
    for run in pair("cast_before_weight"):
        torch.manual_seed(1)
        a, b, weight = (x.requires_grad_() for x in inputs((4, 9)))
        for _ in range(3):
            total, y = run(a, b, weight)
            (total.sin() + y).sum().backward()
            a.grad.mul_(2)  # as clipping does, in place
        results.append((a.grad, b.grad, weight.grad))
    torch.testing.assert_close(*results)
    assert not torch.equal(results[0][0], results[0][1])


def test_an_addend_that_is_used_elsewhere():
    def around(run):
        def call(x, weight):
            total, y = run(x, x * 3, weight)
            again, z = run(total, y, weight)
            return again + x, z, total

        return call

    a, _, weight = inputs((4, 9))
    assert_matches(*map(around, pair("weight_before_cast")), [a, weight])


def test_what_does_not_fit_is_computed_upstreams_way():
    a, b, weight = inputs((4, 9))
    for given in ([a, b.bfloat16(), weight], [a, b[:1], weight], [a.double(), b.double(), weight]):
        assert_matches(*pair("cast_before_weight"), given, exact=True)
    eps = torch.tensor(EPS, device=DEVICE)
    ours, upstream = (run(a, b, weight, eps=eps) for run in pair("cast_before_weight"))
    torch.testing.assert_close(ours, upstream, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(2))
@pytest.mark.parametrize("variant", VARIANTS)
def test_equal_bits_where_one_result_alone_has_a_gradient(variant, part):
    a, b, weight = inputs((64, 130))
    assert_batch_invariant(lambda *given: pair(variant)[0](*given)[part], [a, b], [weight])


class Norm(nn.Module):
    def __init__(self, size=8):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size))

    def forward(self, x):
        return self.weight * x


class Other(Norm):
    pass


class Layer(nn.Module):
    """Adds, and calls a norm."""


LAYER = Layer()


def made(prepare, cls=Norm):
    norm = cls()
    prepare(norm)
    return norm


@pytest.mark.parametrize(
    ("norm", "reason"),
    [
        (Other(), "Other, not the recognised class"),
        (None, "NoneType, not the recognised class"),
        (made(lambda norm: norm.register_forward_hook(lambda *_: None)), "has hooks"),
        (made(lambda norm: norm.register_forward_pre_hook(lambda *_: None)), "has hooks"),
        (made(lambda norm: norm.register_full_backward_hook(lambda *_: None)), "has hooks"),
        (made(lambda norm: setattr(norm, "forward", lambda x: x)), "has its own forward"),
        (made(lambda norm: norm.compile()), "is compiled separately"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_refuses_norms_whose_call_would_be_missed(norm, reason):
    x = torch.randn(2, 8)
    assert refuses(LAYER, x, x, Norm(), Norm) is None
    assert reason in refuses(LAYER, x, x, norm, Norm)


def test_refuses_while_all_modules_are_watched():
    x = torch.randn(2, 8)
    held = nn.modules.module.register_module_forward_pre_hook(lambda *_: None)
    try:
        assert "global hook" in refuses(LAYER, x, x, Norm(), Norm)
    finally:
        held.remove()


@pytest.mark.parametrize(
    ("left", "right", "reason"),
    [
        (torch.randn(2, 8), torch.randn(1, 8), "different shapes"),
        (torch.randn(2, 8), torch.randn(2, 8).bfloat16(), "torch.float32 and torch.bfloat16"),
        (torch.randn(2, 8), torch.randn(2, 8, device="meta"), "different devices"),
        (torch.randn(2, 8).double(), torch.randn(2, 8).double(), "float64"),
        (torch.randn(2, 4), torch.randn(2, 4), "does not match"),
        (torch.randn(2, 8), 1.0, "an operand is a float"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refuses_operands(left, right, reason):
    assert reason in refuses(LAYER, left, right, Norm(), Norm)


def test_refuses_a_norm_with_more_than_a_weight():
    x, norm = torch.randn(2, 8), Norm()
    norm.bias = nn.Parameter(torch.rand(8))
    assert "2 parameters" in refuses(LAYER, x, x, norm, Norm)
    del norm.bias, norm.weight
    assert "0 parameters" in refuses(LAYER, x, x, norm, Norm)
