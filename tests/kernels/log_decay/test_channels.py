"""Decays of channels against the formula: PyTorch's, and Triton's in the interpreter or on a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.matching import assert_matches
from veomni_hook.kernels.log_decay import reference, rules
from veomni_hook.kernels.log_decay import torch as recomputed
from veomni_hook.kernels.log_decay import triton as ours

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * GPU
KERNELS = {"triton": ours, "torch": recomputed}
LOWER = {"softplus": None, "bounded": -5.0}
# The second has several blocks of columns, the third several of rows, the fourth more than one step adds up.
SHAPES = [(2, 3, 3, 5), (1, 2, 9, 128), (2, 35, 2, 8), (1, 140, 1, 128), (2, 0, 2, 4), (1, 1, 1, 1)]


def operands(batch, positions, heads, width, dtype=torch.float32, parameters=None):
    torch.manual_seed(5)
    x = 3 * torch.randn(batch, positions, heads, width, device=DEVICE)
    log_rate = torch.randn(1, 1, heads, 1, device=DEVICE) / 2
    bias = torch.randn(heads * width, device=DEVICE)
    return [x.to(dtype), *(each.to(parameters or dtype) for each in (log_rate, bias))]


def compared(kernel, tensors, lower=None, variant="channels", dtype=None, wanted=None):
    rest = dtype, lower is not None, lower
    one, other = (getattr(of, variant) for of in (KERNELS[kernel], reference))
    assert_matches(lambda *them: one(*them, *rest), lambda *them: other(*them, *rest), tensors, wanted)


@pytest.mark.sample(8)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", LOWER)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_results_and_gradients(kernel, dtype, form, shape):
    compared(kernel, operands(*shape, dtype=dtype), LOWER[form])


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("form", LOWER)
@pytest.mark.parametrize("parameters", [torch.float16, torch.float32], ids=str)
def test_a_rate_that_is_rounded_and_a_result_of_few_bits(kernel, form, parameters):
    tensors = operands(2, 9, 3, 5, torch.float16, parameters)
    compared(kernel, tensors, LOWER[form], "channels_rounded_rate", torch.float16)


def test_a_rate_is_rounded_only_where_upstream_does():
    tensors = operands(2, 9, 3, 5, torch.float16)
    tensors[0] = tensors[0].float()
    one, other = (
        getattr(ours, variant)(*tensors, None, False, None)
        for variant in ("channels", "channels_rounded_rate")
    )
    assert 1e-5 < ((one - other) / other).abs().max() < 1e-3
    torch.testing.assert_close(one, reference.channels(*tensors, None, False, None), rtol=1e-5, atol=0)


@pytest.mark.parametrize("form", LOWER)
def test_strided_operands(form):
    x, log_rate, bias = operands(3, 4, 4, 6)
    half = log_rate[:, :, :2].contiguous(), bias[:12]
    for part in (x[..., :2, :], x[:, :, 2:].transpose(0, 1)):
        compared("triton", [part, *half], LOWER[form])
    compared("triton", [x[..., ::2], log_rate, bias[:12]], LOWER[form])


def test_a_gradient_that_is_strided():
    tensors = [each.requires_grad_() for each in operands(2, 3, 4, 6)]
    incoming = torch.randn(2, 4, 3, 6, device=DEVICE).transpose(1, 2)
    found, expected = (
        torch.autograd.grad(f(*tensors, None, False, None), tensors, incoming)
        for f in (ours.channels, reference.channels)
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("form", LOWER)
def test_values_and_slopes_far_out(form):
    lower = LOWER[form]
    values = [-85.0, -30, -16, -4, -1, -0.1, 0, 0.1, 1, 4, 16, 19.9, 20.1, 30, 200]
    x = torch.tensor(values, device=DEVICE).reshape(1, -1, 1, 1).requires_grad_()
    rate, bias = torch.zeros(1, 1, 1, 1, device=DEVICE), torch.zeros(1, device=DEVICE)
    found = ours.channels(x, rate, bias, None, lower is not None, lower)
    (slope,) = torch.autograd.grad(found.sum(), x)
    z = x.detach().double().requires_grad_()
    expected = -torch.nn.functional.softplus(z, threshold=50) if lower is None else lower * z.sigmoid()
    (slopes,) = torch.autograd.grad(expected.sum(), z)
    # A sigmoid near 1 has few digits of its distance from 1.
    for one, other, of in ((found, expected, z < 999), (slope, slopes, z < (999 if lower is None else 2))):
        error = ((one - other) / other)[of].abs().max().item()
        assert error < (2e-5 if GPU else 1e-6), error


def test_numbers_that_are_none_stay():
    x = torch.tensor([float("nan"), float("inf"), -float("inf")], device=DEVICE).reshape(1, 3, 1, 1)
    rate, bias = torch.zeros(1, 1, 1, 1, device=DEVICE), torch.zeros(1, device=DEVICE)
    for lower in LOWER.values():
        rest = rate, bias, None, lower is not None, lower
        found, expected = (f.channels(x, *rest) for f in (ours, reference))
        torch.testing.assert_close(found, expected, equal_nan=True)


@pytest.mark.parametrize("frozen", [(0,), (1, 2), (0, 1, 2)], ids=str)
def test_frozen_operands(frozen):
    compared("triton", operands(1, 3, 2, 4), wanted=[number not in frozen for number in range(3)])


def test_the_sum_of_a_rate_that_cancels():
    """With a bound the terms of a rate's gradient cancel: the error counts beside their sizes."""
    tensors = [each.requires_grad_() for each in operands(2, 64, 2, 16)]
    g = ours.channels(*tensors, None, True, -5.0)
    incoming = torch.randn_like(g)
    (found,) = torch.autograd.grad(g, tensors[1:2], incoming)
    x, log_rate, bias = (each.detach().double() for each in tensors)
    rate, z = log_rate.exp(), x + bias.view(2, 16)
    s = (rate * z).sigmoid()
    terms = incoming * -5.0 * s * (1 - s) * rate * z
    error = (found - terms.sum((0, 1, 3), keepdim=True)).abs() / terms.abs().sum((0, 1, 3), keepdim=True)
    assert error.max() < (4e-6 if GPU else 1e-6)


def test_the_same_bits_again():
    tensors = [each.requires_grad_() for each in operands(2, 40, 2, 8)]
    runs = [torch.autograd.grad(ours.channels(*tensors, None, False, None).sum(), tensors) for _ in range(2)]
    assert all(map(torch.equal, *runs))


def test_an_operand_of_another_shape_is_the_formulas():
    x, log_rate, bias = operands(2, 3, 4, 4)
    rest = None, True, -5.0
    for them in ((x.double(), log_rate, bias), (x, log_rate.view(4), bias), (x, log_rate[:, :, :1], bias)):
        assert torch.equal(ours.channels(*them, *rest), reference.channels(*them, *rest))


def test_what_is_refused():
    x, log_rate, bias = operands(2, 3, 4, 4)
    assert ours.refuses_channels(None, x, log_rate, bias, None, False, None) is None
    assert ours.refuses_channels(None, x, log_rate, bias, torch.float16, True, -5) is None
    assert "bound is a NoneType" in rules.refuses_channels(None, x, log_rate, bias, None, True, None)
    assert "bound is a Tensor" in rules.refuses_channels(None, x, log_rate, bias, None, True, bias[0])
    assert "one per channel" in rules.refuses_channels(None, x, log_rate, bias[None], None, False, None)
    assert "float64" in ours.refuses_channels(None, x, log_rate, bias, torch.float64, False, None)
    assert "int32" in ours.refuses_channels(None, x, log_rate, bias.int(), None, False, None)
    assert "not contiguous" in ours.refuses_channels(None, x, log_rate, bias[::2], None, False, None)
    assert "wider" in ours.refuses_channels(
        None, x, log_rate, torch.randn(8192, device=DEVICE), None, False, None
    )


@pytest.mark.parametrize("form", LOWER)
def test_the_operators_are_what_their_schema_says(form):
    x, log_rate, bias = operands(2, 3, 2, 4)
    ops = torch.ops.veomni_hook
    torch.library.opcheck(ops.log_decay_channels, (x, log_rate, bias, torch.float16, LOWER[form], True))
    dg = torch.randn_like(x)
    torch.library.opcheck(ops.log_decay_channels_backward, (x, log_rate, bias, dg, LOWER[form], False))
