"""Triton's causal convolution against the formula in float64: in the interpreter, or on a GPU."""

from __future__ import annotations

import pytest
import torch
from transformers.models.qwen3_next.modeling_qwen3_next import causal_conv1d_fn

pytest.importorskip("triton")

from tests.kernels.causal_conv.test_torch import LENGTHS, OWNER, bounds, operands
from tests.kernels.matching import assert_matches
from veomni_hook.kernels.causal_conv import reference
from veomni_hook.kernels.causal_conv import triton as ours

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"


def compared(tensors, activation="silu", cu_seqlens=None):
    tensors = [each.to(DEVICE) for each in tensors]
    cu_seqlens = None if cu_seqlens is None else cu_seqlens.to(DEVICE)
    low = tensors[0].dtype

    def formula(*operands):
        given = [each.double() for each in operands] + [None] * (3 - len(operands))
        return reference.depthwise(*given, activation, cu_seqlens).to(low)

    def found(*operands):
        return ours.depthwise(*operands, *[None] * (3 - len(operands)), activation, cu_seqlens)

    # The sum is rounded to the dtype of the weight in front of silu.
    assert_matches(found, formula, tensors, tolerance=1.5e-2 if low is torch.bfloat16 else 3e-6)


@pytest.mark.parametrize("activation", ["silu", None])
def test_samples_that_share_a_row(activation):
    compared(operands(), activation, bounds(LENGTHS))


@pytest.mark.parametrize("taps", [1, 2, 3])
def test_other_kernels_without_a_bias(taps):
    compared(operands(taps=taps)[:2], "silu", bounds(LENGTHS))


@pytest.mark.slow
def test_bits_do_not_change():
    def step():
        leaves = [each.to(DEVICE).detach().requires_grad_() for each in operands(2, 70)]
        output = ours.depthwise(*leaves, "silu", bounds([33, 60, 47]).to(DEVICE))
        output.square().sum().backward()
        return [output, *(each.grad for each in leaves)]

    assert all(map(torch.equal, step(), step()))


def test_samples_in_several_rows():
    compared(operands(2, 7), "silu", bounds([3, 4, 1, 6]))


def test_rows_longer_than_a_program():
    compared(operands(2, 70))


def test_another_layout_and_no_positions():
    x, weight, bias = operands(2, 9)
    compared([x.contiguous(), weight, bias], None)
    compared([x[:, :, :0], weight, bias], None)
    found = ours.depthwise(x.to(DEVICE), weight.to(DEVICE))
    assert found.shape == x.shape and found.stride(1) == 1


def test_channels_of_a_wider_projection_are_not_copied(monkeypatch):
    wide = torch.randn(1, 9, 8).transpose(1, 2)
    monkeypatch.setattr(torch.Tensor, "contiguous", lambda x: x if x.dim() == 2 else pytest.fail("copied"))
    assert ours._by_position(wide[:, :6]).data_ptr() == wide.data_ptr()


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize("packed", [False, True])
def test_bfloat16_of_many_channels(packed):
    rows, positions, channels = 2, 300, 1000
    x = torch.randn(rows, positions, channels).to(torch.bfloat16).transpose(1, 2)
    tensors = [x, torch.randn(channels, 4).to(torch.bfloat16), torch.randn(channels).to(torch.bfloat16)]
    compared(tensors, "silu", bounds([100, 1, 199, 2, 298]) if packed else None)


def test_refusals():
    def refused(taps=4, dtype=torch.float32, bias=torch.float32):
        x, weight, added = operands(taps=taps)
        return ours.refuses(OWNER, x.to(dtype), weight, added.to(bias), "silu", None, causal_conv1d_fn)

    assert refused() is None and refused(dtype=torch.bfloat16) is None
    assert refused(taps=5) == "the kernel has 5 taps, more than 4"
    assert "torch.float64" in refused(dtype=torch.float64)
    assert "torch.float32" in refused(bias=torch.bfloat16)
