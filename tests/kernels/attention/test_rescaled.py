"""Attention's output times the share that sinks leave it: outputs and gradients against the formula."""

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.matching import DEVICE
from veomni_hook.kernels.attention.rescaled import rescaled


def operands(length, heads=3, batch=2, width=16, dtype=torch.float32, *, positions_first=True):
    shape = (batch, length, heads, width) if positions_first else (batch, heads, length, width)
    x = torch.randn(shape, device=DEVICE, dtype=dtype)
    lse = torch.randn(batch, heads, length, device=DEVICE)
    return [x.transpose(1, 2) if positions_first else x, lse, torch.randn(heads, device=DEVICE).to(dtype)]


def formula(x, lse, sinks):
    share = torch.sigmoid(lse - sinks.double()[:, None])
    return (x * share[..., None]).transpose(1, 2)


def assert_equal(given, dtype, turned=lambda y: y):
    leaves = [one.detach().requires_grad_() for one in given]
    truths = [one.detach().double().requires_grad_() for one in given]
    y, truth = turned(rescaled(*leaves)), turned(formula(*truths))
    assert y.dtype is dtype
    upward = torch.randn(truth.shape, device=DEVICE)
    got = [y, *torch.autograd.grad(y, leaves, upward.to(y))]
    expected = [truth, *torch.autograd.grad(truth, truths, upward.to(dtype).double())]
    for one, other, leaf in zip(got, expected, (None, *leaves), strict=True):
        assert leaf is None or one.dtype is leaf.dtype
        error = (one.double() - other).norm() / other.norm().clamp(min=1e-30)
        assert error < {torch.float32: 1e-6, torch.bfloat16: 5e-3}[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("positions_first", [True, False])
@pytest.mark.parametrize("length", [1, 37, 300])
def test_equals_the_formula(length, positions_first, dtype):
    if dtype is torch.bfloat16 and DEVICE == "cpu":
        dtype = torch.float32  # the interpreter cuts bfloat16 off
    assert_equal(operands(length, dtype=dtype, positions_first=positions_first), dtype)


def test_strides_of_operands_and_gradients():
    x, lse, sinks = operands(10)
    wide = torch.randn(2, 3, 20, 16, device=DEVICE)[:, :, ::2]
    assert_equal([wide, lse, sinks], torch.float32)
    assert_equal([x.flip(-1).transpose(2, 3).contiguous().transpose(2, 3), lse, sinks], torch.float32)
    assert_equal([x, lse.transpose(1, 2).contiguous().transpose(1, 2), sinks], torch.float32)
    assert_equal([x, lse, sinks], torch.float32, turned=lambda y: y.transpose(1, 2).flip(0))
    assert rescaled(x, lse, sinks).is_contiguous()


def test_rows_that_see_no_key_are_zero():
    x, lse, sinks = (one.requires_grad_() for one in operands(5))
    hidden = torch.full_like(lse, -torch.inf).detach().requires_grad_()
    y = rescaled(x, hidden, sinks)
    assert not y.any()
    for gradient in torch.autograd.grad(y, (x, hidden, sinks), torch.randn_like(y)):
        assert not gradient.any()


def test_the_operators_keep_their_contracts():
    x, lse, sinks = operands(9)
    for overload, given in (
        (torch.ops.veomni_hook.rescaled.default, (x, lse, sinks)),
        (torch.ops.veomni_hook.rescaled_backward.default, (x, lse, sinks, torch.randn(2, 9, 3, 16).to(x))),
    ):
        torch.library.opcheck(overload, given)


def test_frozen_sinks_and_empty_batches():
    x, lse, sinks = operands(4)
    (gradient,) = torch.autograd.grad(rescaled(x.requires_grad_(), lse, sinks).sum(), x)
    assert gradient.shape == x.shape
    assert rescaled(x[:0], lse[:0], sinks).shape == (0, 4, 3, 16)
