"""The fused addition and RMSNorm against its reference, through the interpreter or compiled."""

from operator import itemgetter

import pytest
import torch
from torch import nn

from tests.kernels.contract import DTYPES, call_of
from tests.kernels.declared import refusal
from tests.kernels.matching import DEVICE, assert_matches
from veomni_hook.kernels.add_rms_norm.variants import OP

pytest.importorskip("triton")

from veomni_hook.kernels.rms_norm import tiles

VARIANTS = sorted(OP.variants)

refuses = refusal("add_rms_norm", "cast_before_weight", "triton")


def call(variant="cast_before_weight", size=(4, 9), *of, **changed):
    return call_of("add_rms_norm", variant, "triton", size, *of, **changed)


@pytest.mark.sample(1)  # the interpreter needs seconds for each
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_wide_rows(variant, dtype):
    call(variant, (3, 4100), dtype).matches()


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [23, 40])
@pytest.mark.parametrize("variant", ["cast_before_weight", "one_plus_weight"])
def test_parts_equal_the_reference(in_parts, variant, columns, dtype):
    assert tiles.wide(columns, 4, fetched=False)
    call(variant, (7, columns), dtype).matches()


@pytest.mark.sample(8)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [17, 23, 40])
@pytest.mark.parametrize("variant", VARIANTS)
def test_two_blocks_equal_the_reference(split_early, variant, columns, dtype):
    assert tiles.split(columns)[1]
    call(variant, (67, columns), dtype).matches()


@pytest.mark.sample(2)
@pytest.mark.parametrize("weight_dtype", [torch.float32, None], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_sum_has_upstreams_bits_and_casts_stand_where_upstreams_do(variant, weight_dtype):
    # The interpreter cuts bfloat16 off.
    made = call(variant, (257, 96), torch.bfloat16 if DEVICE == "cuda" else torch.float16, weight_dtype)
    (found_sum, found), (true_sum, truth) = (run(*made.tensors) for run in (made.ours, made.theirs))
    assert torch.equal(found_sum, true_sum)
    assert (~torch.isclose(found.float(), truth.float(), rtol=2e-6, atol=0)).float().mean() < 0.01


def test_only_the_norm_is_used():
    call("one_plus_weight_rounded").matches(of=itemgetter(1))


@pytest.mark.parametrize("used", [0, 1])
def test_one_result_of_the_kernel_in_pytorch(used):
    call_of("add_rms_norm", "one_plus_weight", "torch", (5, 8)).matches(of=itemgetter(used), exact=True)


def test_only_the_sum_is_used():
    made = call("one_plus_weight_rounded")
    a, b, weight = (x.requires_grad_() for x in made.tensors)
    made.ours(a, b, weight)[0].square().sum().backward()
    torch.testing.assert_close(a.grad, 2 * (a + b).detach())
    assert torch.equal(a.grad, b.grad) and weight.grad is None


def test_one_tensor_is_the_gradient_of_both_and_stays_right():
    """Two leaves get one tensor, and what is accumulated into the one does not show in the other."""
    results, made = [], call()
    for run in (made.ours, made.theirs):
        a, b, weight = (x.clone().requires_grad_() for x in made.tensors)
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

    made = call("weight_before_cast")
    a, _, weight = made.tensors
    assert_matches(around(made.ours), around(made.theirs), [a, weight])


def test_what_does_not_fit_is_computed_upstreams_way():
    wide = dict.fromkeys(("residual", "hidden_states"), torch.Tensor.double)
    other = {"hidden_states": torch.Tensor.bfloat16}, {"hidden_states": lambda b: b[:1]}, wide
    for change in (*other, {"eps": lambda eps: torch.tensor(eps, device=DEVICE)}):
        call(**change).matches(exact=True)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(2))
@pytest.mark.parametrize("variant", VARIANTS)
def test_equal_bits_where_one_result_alone_has_a_gradient(variant, part):
    call(variant, (64, 130)).is_batch_invariant(part)


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
    with nn.modules.module.register_module_forward_pre_hook(lambda *_: None):
        assert "global hook" in refuses(LAYER, x, x, Norm(), Norm)


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
