"""Decays, one a head and one a channel, against the formula: PyTorch's, and Triton's interpreted or on a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.declared import refusal
from tests.kernels.matching import assert_matches, close
from veomni_hook.kernels.log_decay import reference
from veomni_hook.kernels.log_decay import torch as recomputed
from veomni_hook.kernels.log_decay import triton as ours

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * GPU
KERNELS = {"triton": ours, "torch": recomputed}
#: A variant, and for decays of channels the bound.
FORMS = {
    "softplus": ("softplus",),
    "softplus and sigmoid": ("softplus_and_sigmoid",),
    "channels": ("channels", None),
    "channels, bounded": ("channels", -5.0),
    "rounded rate": ("channels_rounded_rate", None),
    "rounded rate, bounded": ("channels_rounded_rate", -5.0),
}
OF_CHANNELS = [name for name in FORMS if "channels" in name]
#: Of channels, the second has several blocks of columns, the third several of rows, the fourth more than one step
#: adds up.
SHAPES = {
    False: [(2, 70, 6), (1, 1, 32), (3, 33), (2, 0, 4), (1, 5, 1)],
    True: [(2, 3, 3, 5), (1, 2, 9, 128), (2, 35, 2, 8), (1, 140, 1, 128), (2, 0, 2, 4), (1, 1, 1, 1)],
}


def function(home, form, dtype=None):
    """A kernel of the tensors alone."""
    variant, *bound = FORMS[form]
    rest = (dtype, bound[0] is not None, bound[0]) if bound else ()
    return lambda *tensors: getattr(home, variant)(*tensors, *rest)


def operands(form, *shape, dtype=torch.float32, parameters=None):
    torch.manual_seed(3)
    of_channels = len(FORMS[form]) > 1
    x, b = (3 * torch.randn(shape, device=DEVICE).to(dtype) for _ in range(2))
    sizes = ((1, 1, shape[2], 1), (shape[2] * shape[3],)) if of_channels else (shape[-1:], shape[-1:])
    log_rate, bias = (torch.randn(size, device=DEVICE) / 2 for size in sizes)
    tensors = [x, log_rate.to(parameters or dtype), bias.to(parameters or dtype)]
    return [*tensors, b] if form == "softplus and sigmoid" else tensors


def compared(kernel, form, tensors, wanted=None, dtype=None):
    sides = (function(home, form, dtype) for home in (KERNELS[kernel], reference))
    assert_matches(*sides, tensors, wanted)


CASES = [(form, shape) for form in FORMS for shape in SHAPES["channels" in FORMS[form][0]]]


@pytest.mark.sample(24)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("form", "shape"), CASES, ids=str)
def test_results_and_gradients(kernel, dtype, form, shape):
    compared(kernel, form, operands(form, *shape, dtype=dtype))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("parameters", [torch.float16, torch.float32], ids=str)
def test_parameters_in_another_dtype_and_a_result_of_few_bits(kernel, form, parameters):
    shape = SHAPES["channels" in FORMS[form][0]][0]
    tensors = operands(form, *shape, dtype=torch.float16, parameters=parameters)
    compared(kernel, form, tensors, dtype=torch.float16)


def test_a_rate_is_rounded_only_where_upstream_does():
    tensors = operands("channels", 2, 9, 3, 5, dtype=torch.float16)
    tensors[0] = tensors[0].float()
    one, other = (function(ours, form)(*tensors) for form in ("channels", "rounded rate"))
    assert 1e-5 < ((one - other) / other).abs().max() < 1e-3
    torch.testing.assert_close(one, function(reference, "channels")(*tensors), rtol=1e-5, atol=0)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("form", FORMS)
def test_strided_operands(kernel, form):
    """Heads that are a part of a projection's columns, other channels of each, and rows out of order."""
    if form in OF_CHANNELS or "rounded" in form:
        x, log_rate, bias = operands(form, 3, 4, 4, 6)
        half = log_rate[:, :, :2].contiguous(), bias[:12]
        calls = [
            [x[..., :2, :], *half],
            [x[:, :, 2:].transpose(0, 1), *half],
            [x[..., ::2], log_rate, bias[:12]],
        ]
    else:
        a, log_rate, bias, *_ = operands(form, 2, 9, 12)
        parameters = log_rate[:6], bias[:6]
        sigmoids = form == "softplus and sigmoid"
        calls = [
            [a[..., :6].transpose(0, 1), *parameters, *[a[..., 6:].transpose(0, 1)] * sigmoids],
            [a[..., ::2], *parameters, *[a[..., 1::2]] * sigmoids],
        ]
    for tensors in calls:
        compared(kernel, form, tensors)


def test_a_gradient_that_is_strided():
    tensors = [each.requires_grad_() for each in operands("channels", 2, 3, 4, 6)]
    incoming = torch.randn(2, 4, 3, 6, device=DEVICE).transpose(1, 2)
    found, expected = (
        torch.autograd.grad(function(home, "channels")(*tensors), tensors, incoming)
        for home in (ours, reference)
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("form", ["softplus", *OF_CHANNELS])
def test_values_and_slopes_far_out(form):
    lower = FORMS[form][-1] if form in OF_CHANNELS else None
    values = [-200.0, -90, -85, -30, -16, -12, -4, -1, -0.1, 0, 0.1, 1, 4, 12, 16, 19.9, 20.1, 30, 200]
    x = torch.tensor(values[0 if form == "softplus" else 2 :], device=DEVICE)
    x = x.reshape((-1, 1) if form == "softplus" else (1, -1, 1, 1)).requires_grad_()
    rate, bias = (
        torch.zeros(1 if form == "softplus" else (1, 1, 1, 1), device=DEVICE),
        torch.zeros(1, device=DEVICE),
    )
    found = function(ours, form)(x, rate, bias)
    (slope,) = torch.autograd.grad(found.sum(), x)
    z = x.detach().double().requires_grad_()
    expected = -torch.nn.functional.softplus(z, threshold=50) if lower is None else lower * z.sigmoid()
    (slopes,) = torch.autograd.grad(expected.sum(), z)
    normal = expected.abs() > 1e-37
    # A sigmoid near 1 has few digits of its distance from 1; a GPU's exponential loses some with its argument.
    for one, other, of in (
        (found, expected, normal),
        (slope, slopes, normal & (z < (999 if lower is None else 2))),
    ):
        error = ((one - other) / other)[of].abs().max().item()
        assert error < (2e-5 if GPU else 1e-6), error
    # Subnormal numbers: the last of their few bits may differ on a GPU.
    truth = function(reference, form)(x, rate, bias)
    torch.testing.assert_close(found[~normal], truth[~normal], rtol=0, atol=1e-44 if GPU else 0)


@pytest.mark.parametrize("form", OF_CHANNELS)
def test_numbers_that_are_none_stay(form):
    x = torch.tensor([float("nan"), float("inf"), -float("inf")], device=DEVICE).reshape(1, 3, 1, 1)
    rate, bias = torch.zeros(1, 1, 1, 1, device=DEVICE), torch.zeros(1, device=DEVICE)
    found, expected = (function(home, form)(x, rate, bias) for home in (ours, reference))
    torch.testing.assert_close(found, expected, equal_nan=True)


@pytest.mark.parametrize("form", ["softplus and sigmoid", "channels"])
@pytest.mark.parametrize("frozen", [(0,), (1, 2), (0, 1, 2), (3,)], ids=str)
def test_frozen_operands(form, frozen):
    tensors = operands(form, *((2, 9, 6) if form not in OF_CHANNELS else (1, 3, 2, 4)))
    compared("triton", form, tensors, [number not in frozen for number in range(len(tensors))])


def test_gradients_of_one_result_only():
    for take in (0, 1):
        tensors = [each.requires_grad_() for each in operands("softplus and sigmoid", 2, 9, 6)]
        found, expected = (
            torch.autograd.grad(
                home.softplus_and_sigmoid(*tensors)[take].square().sum(), tensors, allow_unused=True
            )
            for home in (ours, reference)
        )
        for one, other in zip(found, expected, strict=True):
            close(one, torch.zeros_like(one) if other is None else other, 1e-5)


def test_the_sum_of_a_rate_that_cancels():
    """With a bound the terms of a rate's gradient cancel: the error counts beside their sizes."""
    tensors = [each.requires_grad_() for each in operands("channels, bounded", 2, 64, 2, 16)]
    g = function(ours, "channels, bounded")(*tensors)
    incoming = torch.randn_like(g)
    (found,) = torch.autograd.grad(g, tensors[1:2], incoming)
    x, log_rate, bias = (each.detach().double() for each in tensors)
    rate, z = log_rate.exp(), x + bias.view(2, 16)
    s = (rate * z).sigmoid()
    terms = incoming * -5.0 * s * (1 - s) * rate * z
    error = (found - terms.sum((0, 1, 3), keepdim=True)).abs() / terms.abs().sum((0, 1, 3), keepdim=True)
    assert error.max() < (4e-6 if GPU else 1e-6)


@pytest.mark.parametrize(("form", "shape"), [("softplus", (4, 300, 6)), ("channels", (2, 40, 2, 8))])
def test_the_same_bits_again(form, shape):
    tensors = [each.requires_grad_() for each in operands(form, *shape)]
    runs = [torch.autograd.grad(function(ours, form)(*tensors).sum(), tensors) for _ in range(2)]
    assert all(map(torch.equal, *runs))


def test_operands_of_another_kind_are_the_formulas():
    a, log_rate, bias = operands("softplus", 2, 9, 6)
    wide = torch.randn(2, 9, 6, 6, device=DEVICE)[..., :1]
    calls = [("softplus", (a.double(), log_rate, bias)), ("softplus", (wide, log_rate, bias))]
    x, rate, shift = operands("channels, bounded", 2, 3, 4, 4)
    for tensors in ((x.double(), rate, shift), (x, rate.view(4), shift), (x, rate[:, :, :1], shift)):
        calls.append(("channels, bounded", tensors))
    for form, tensors in calls:
        assert torch.equal(function(ours, form)(*tensors), function(reference, form)(*tensors))


def test_what_is_refused():
    refuses = refusal("log_decay", "softplus_and_sigmoid", "triton")
    a, log_rate, bias, b = operands("softplus and sigmoid", 2, 9, 6)
    assert refuses(None, a, log_rate, bias, b) is None
    assert "float64" in refuses(None, a, log_rate.double(), bias, b)
    assert "not contiguous" in refuses(None, a, torch.randn(12, device=DEVICE)[::2], bias, b)
    assert "one per head" in refuses(None, a, log_rate[None], bias, b)
    assert "shapes" in refuses(None, a, log_rate, bias, b[:1])
    assert "operand is a float" in refuses(None, a, 1.0, bias, b)
    assert "operand is a float" in refuses(None, a, log_rate, bias, 1.0)
    assert "heads" in refuses(None, *operands("softplus and sigmoid", 1, 1, 2048))


def test_what_is_refused_of_channels():
    refuses = refusal("log_decay", "channels", "triton")
    x, log_rate, bias = operands("channels", 2, 3, 4, 4)

    def refused(bias=bias, dtype=None, bound=(False, None)):
        return refuses(None, x, log_rate, bias, dtype, *bound)

    assert refused() is refused(dtype=torch.float16, bound=(True, -5)) is None
    assert "bound is a NoneType" in refused(bound=(True, None))
    assert "bound is a Tensor" in refused(bound=(True, bias[0]))
    assert "one per channel" in refused(bias[None])
    assert "float64" in refused(dtype=torch.float64)
    assert "int32" in refused(bias.int())
    assert "not contiguous" in refused(bias[::2])
    assert "wider" in refused(torch.randn(8192, device=DEVICE))


@pytest.mark.parametrize("lower", [None, -5.0])
def test_the_operators_are_what_their_schema_says(lower):
    tensors = operands("channels", 2, 3, 2, 4)
    ops = torch.ops.veomni_hook
    torch.library.opcheck(ops.log_decay_channels, (*tensors, torch.float16, lower, True))
    dg = torch.randn_like(tensors[0])
    torch.library.opcheck(ops.log_decay_channels_backward, (*tensors, dg, lower, False))
