"""The causal convolution against the formula in float64, and against transformers' fallback."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers.models.qwen3_next.modeling_qwen3_next import causal_conv1d_fn

from tests.kernels.matching import assert_matches
from veomni_hook.kernels.causal_conv import operand_checks, reference
from veomni_hook.kernels.causal_conv import torch as ours

#: Longer and shorter than the taps, one position, none.
LENGTHS = [5, 1, 0, 2, 9, 1, 1, 4]
OWNER = SimpleNamespace()


def operands(rows=1, positions=23, *, dtype=torch.float32, taps=4):
    """The input as models have it (positions first in memory), weight and bias."""
    torch.manual_seed(0)
    x = torch.randn(rows, positions, 6).to(dtype).transpose(1, 2)
    return [x, torch.randn(6, taps).to(dtype), torch.randn(6).to(dtype)]


def bounds(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def compared(tensors, activation, cu_seqlens):
    """Compare with the formula in float64, rounded to the dtype of the operands."""
    low = tensors[0].dtype

    def formula(*operands):
        given = [each.double() for each in operands] + [None] * (3 - len(operands))
        return reference.depthwise(*given, activation, cu_seqlens).to(low)

    def found(*operands):
        return ours.depthwise(*operands, *[None] * (3 - len(operands)), activation, cu_seqlens)

    assert_matches(found, formula, tensors, tolerance=1.5e-2 if low is torch.bfloat16 else 3e-6)


@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_samples_that_share_a_row(dtype, activation):
    compared(operands(dtype=dtype), activation, bounds(LENGTHS))


@pytest.mark.parametrize("taps", [1, 2, 7])
def test_other_kernels_without_a_bias(taps):
    compared(operands(taps=taps)[:2], "silu", bounds(LENGTHS))


def test_bits_do_not_change():
    def step():
        leaves = [each.requires_grad_() for each in operands(2, 70)]
        output = ours.depthwise(*leaves, "silu", bounds([33, 60, 47]))
        output.square().sum().backward()
        return [output, *(each.grad for each in leaves)]

    assert all(map(torch.equal, step(), step()))


def test_samples_in_several_rows():
    compared(operands(2, 7), "silu", bounds([3, 4, 1, 6]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_upstreams_bit_for_bit(dtype):
    tensors = operands(2, 9, dtype=dtype)
    assert_matches(
        lambda *each: ours.depthwise(*each, "silu"),
        lambda *each: causal_conv1d_fn(*each, "silu"),
        tensors,
        exact=True,
    )


def test_a_sample_does_not_depend_on_the_others():
    x, weight, bias = operands()
    whole = ours.depthwise(x, weight, bias, "silu", bounds(LENGTHS))
    x[:, :, :5] = torch.inf
    changed = ours.depthwise(x, weight, bias, "silu", bounds(LENGTHS))
    assert torch.equal(whole[:, :, 5:], changed[:, :, 5:])
    assert not torch.equal(whole[:, :, :5], changed[:, :, :5])


def test_what_does_not_fit_is_refused():
    def refused(x=None, weight=None, activation="silu", cu_seqlens=None, upstream=causal_conv1d_fn):
        held = operands()
        x, weight = held[0] if x is None else x, held[1] if weight is None else weight
        return operand_checks.refuses(OWNER, x, weight, held[2], activation, cu_seqlens, upstream)

    assert refused() is None and refused(cu_seqlens=bounds(LENGTHS)) is None
    assert "do not divide 23 positions" in refused(cu_seqlens=bounds(LENGTHS[1:]))
    assert "the activation is gelu" in refused(activation="gelu")
    assert "the weight [5, 4]" in refused(weight=torch.zeros(5, 4))
    assert "the input is [6, 23]" in refused(x=torch.zeros(6, 23))
    assert "replaced by" in refused(upstream=compared)
