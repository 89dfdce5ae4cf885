"""Decays against the formula in float64: PyTorch's, and Triton's in the interpreter or on a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.declared import refusal
from tests.kernels.matching import assert_matches, close
from veomni_hook.kernels.log_decay import reference, rules
from veomni_hook.kernels.log_decay import torch as chunked
from veomni_hook.kernels.log_decay import triton as ours

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * GPU
KERNELS = {"triton": ours, "torch": chunked}

refuses = refusal("log_decay", "softplus_and_sigmoid", "triton")


def operands(*shape, dtype=torch.float32, parameters=None):
    torch.manual_seed(3)
    heads = shape[-1]
    a, b = (3 * torch.randn(shape, device=DEVICE).to(dtype) for _ in range(2))
    log_rate, bias = (torch.randn(heads, device=DEVICE).to(parameters or dtype) for _ in range(2))
    return [a, log_rate, bias, b]


def compared(kernel, tensors, variant="softplus_and_sigmoid", tolerance=None):
    formula = getattr(reference, variant)
    tensors = tensors if variant == "softplus_and_sigmoid" else tensors[:3]
    assert_matches(getattr(KERNELS[kernel], variant), formula, tensors, tolerance=tolerance)


@pytest.mark.sample(7)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("variant", ["softplus", "softplus_and_sigmoid"])
@pytest.mark.parametrize("shape", [(2, 70, 6), (1, 1, 32), (3, 33), (2, 0, 4), (1, 5, 1)])
def test_results_and_gradients(kernel, dtype, variant, shape):
    compared(kernel, operands(*shape, dtype=dtype), variant)


def test_parameters_in_another_dtype():
    compared("triton", operands(2, 9, 6, dtype=torch.float16, parameters=torch.float32))


@pytest.mark.parametrize("kernel", KERNELS)
def test_strided_operands(kernel):
    a, log_rate, bias, _ = operands(2, 9, 12)
    halves = a[..., :6], log_rate[:6], bias[:6], a[..., 6:]
    compared(kernel, [halves[0].transpose(0, 1), *halves[1:3], halves[3].transpose(0, 1)])
    compared(kernel, [a[..., ::2], *halves[1:3], a[..., 1::2]])


def test_values_far_out():
    a = torch.tensor([-200.0, -90, -30, -12, -4, -1, 0, 1, 4, 12, 19.9, 20.1, 30, 200], device=DEVICE)
    a = a.reshape(-1, 1)
    rate, bias = torch.tensor([0.5], device=DEVICE), torch.tensor([0.0], device=DEVICE)
    found, truth = (f(a, rate, bias) for f in (ours.softplus, reference.softplus))
    expected = -rate.double().exp() * torch.nn.functional.softplus(a.double() + bias)
    # Relative to each value, also where the softplus is tiny.
    seen = expected.abs() > 1e-37
    error = ((found - expected) / expected)[seen].abs().max().item()
    # A GPU's exponential loses digits in proportion to its argument.
    assert error < (1e-5 if GPU else 1e-6), error
    # Subnormal numbers: the last of their few bits may differ on a GPU.
    torch.testing.assert_close(found[~seen], truth[~seen], rtol=0, atol=1e-44 if GPU else 0)


@pytest.mark.parametrize("frozen", [(0,), (1, 2), (3,), (0, 1, 2)])
def test_frozen_operands(frozen):
    tensors = operands(2, 9, 6)
    wanted = [number not in frozen for number in range(4)]
    assert_matches(ours.softplus_and_sigmoid, reference.softplus_and_sigmoid, tensors, wanted)


def test_gradients_of_one_result_only():
    for take in (0, 1):
        tensors = [each.requires_grad_() for each in operands(2, 9, 6)]
        found, expected = (
            torch.autograd.grad(f(*tensors)[take].square().sum(), tensors, allow_unused=True)
            for f in (ours.softplus_and_sigmoid, reference.softplus_and_sigmoid)
        )
        for one, other in zip(found, expected, strict=True):
            close(one, torch.zeros_like(one) if other is None else other, 1e-5)


def test_a_projection_of_another_kind_is_the_formulas():
    a, log_rate, bias, _ = operands(2, 9, 6)
    assert torch.equal(
        ours.softplus(a.double(), log_rate, bias), reference.softplus(a.double(), log_rate, bias)
    )
    wide = torch.randn(2, 9, 6, 6, device=DEVICE)
    wide = wide[..., :1]
    assert torch.equal(ours.softplus(wide, log_rate, bias), reference.softplus(wide, log_rate, bias))


def test_the_same_bits_again():
    tensors = [each.requires_grad_() for each in operands(4, 300, 6)]
    runs = [torch.autograd.grad(ours.softplus(*tensors[:3]).sum(), tensors[:3]) for _ in range(2)]
    assert all(map(torch.equal, *runs))


def test_what_is_refused():
    a, log_rate, bias, b = operands(2, 9, 6)
    assert refuses(None, a, log_rate, bias, b) is None
    assert "float64" in ours.refuses(None, a, log_rate.double(), bias)
    assert "not contiguous" in ours.refuses(None, a, torch.randn(12, device=DEVICE)[::2], bias)
    assert "one per head" in rules.refuses(None, a, log_rate[None], bias)
    assert "shapes" in rules.refuses_with_sigmoid(None, a, log_rate, bias, b[:1])
    assert "operand is a float" in rules.refuses(None, a, 1.0, bias)
    assert "heads" in ours.refuses(None, *operands(1, 1, 2048)[:3])
