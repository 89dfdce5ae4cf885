"""Decays, one a head and one a channel, beside what `test_contract` holds: values far out, and what is refused."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels import declared
from tests.kernels.declared import refusal
from tests.kernels.matching import assert_matches, close
from veomni_hook.kernels.log_decay import reference
from veomni_hook.kernels.log_decay import triton as ours

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
OP = "log_decay"
KERNELS = {
    "triton": ours,
    "torch": SimpleNamespace(
        **{variant: declared.kernel(OP, variant, "torch") for variant in declared.kernels(OP, "torch")}
    ),
}
#: A variant, and for decays of channels the bound.
FORMS = {
    "softplus": ("softplus",),
    "softplus and sigmoid": ("softplus_and_sigmoid",),
    "channels": ("channels", None),
    "channels, bounded": ("channels", -5.0),
    "rounded rate": ("channels_rounded_rate", None),
    "rounded rate, bounded": ("channels_rounded_rate", -5.0),
}
OF_CHANNELS = [name for name in FORMS if len(FORMS[name]) > 1]


def function(home, form, dtype=None):
    """A kernel of the tensors alone."""
    variant, *bound = FORMS[form]
    rest = (dtype, bound[0] is not None, bound[0]) if bound else ()
    return lambda *tensors: getattr(home, variant)(*tensors, *rest)


def operands(form, *shape, dtype=torch.float32, parameters=None):
    torch.manual_seed(3)
    of_channels = form in OF_CHANNELS
    x, b = (3 * torch.randn(shape, device=DEVICE).to(dtype) for _ in range(2))
    sizes = ((1, 1, shape[2], 1), (shape[2] * shape[3],)) if of_channels else (shape[-1:], shape[-1:])
    log_rate, bias = (torch.randn(size, device=DEVICE) / 2 for size in sizes)
    tensors = [x, log_rate.to(parameters or dtype), bias.to(parameters or dtype)]
    return [*tensors, b] if form == "softplus and sigmoid" else tensors


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("form", OF_CHANNELS)
@pytest.mark.parametrize("parameters", [torch.float16, torch.float32], ids=str)
def test_a_result_of_few_bits(kernel, form, parameters):
    tensors = operands(form, 2, 3, 3, 5, dtype=torch.float16, parameters=parameters)
    sides = (function(home, form, torch.float16) for home in (KERNELS[kernel], reference))
    assert_matches(*sides, tensors)


def test_a_rate_is_rounded_only_where_upstream_does():
    tensors = operands("channels", 2, 9, 3, 5, dtype=torch.float16)
    tensors[0] = tensors[0].float()
    one, other = (function(ours, form)(*tensors) for form in ("channels", "rounded rate"))
    assert 1e-5 < ((one - other) / other).abs().max() < 1e-3
    torch.testing.assert_close(one, function(reference, "channels")(*tensors), rtol=1e-5, atol=0)


@pytest.mark.parametrize("form", ["softplus", "channels", "channels, bounded"])
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


@pytest.mark.parametrize("form", ["channels", "channels, bounded"])
def test_numbers_that_are_none_stay(form):
    x = torch.tensor([float("nan"), float("inf"), -float("inf")], device=DEVICE).reshape(1, 3, 1, 1)
    rate, bias = torch.zeros(1, 1, 1, 1, device=DEVICE), torch.zeros(1, device=DEVICE)
    found, expected = (function(home, form)(x, rate, bias) for home in (ours, reference))
    torch.testing.assert_close(found, expected, equal_nan=True)


@pytest.mark.parametrize("kernel", KERNELS)
def test_heads_that_are_a_part_of_a_projections_columns(kernel):
    a, log_rate, bias, _ = operands("softplus and sigmoid", 2, 9, 12)
    halves = [a[..., :6].transpose(0, 1), log_rate[:6], bias[:6], a[..., 6:].transpose(0, 1)]
    sides = (function(home, "softplus and sigmoid") for home in (KERNELS[kernel], reference))
    assert_matches(*sides, halves)


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
