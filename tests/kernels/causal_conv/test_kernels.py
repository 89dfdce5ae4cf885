"""Both kernels of the causal convolution against the formula in float64, and against transformers' fallback.

Triton's run in the interpreter, or on a GPU.
"""

from types import SimpleNamespace

import pytest
import torch
from transformers.models.qwen3_next import modeling_qwen3_next

from tests.kernels import declared
from tests.kernels.matching import assert_matches
from veomni_hook.kernels.causal_conv import reference
from veomni_hook.kernels.causal_conv import torch as in_torch

#: Longer and shorter than the taps, one position, none.
LENGTHS = [5, 1, 0, 2, 9, 1, 1, 4]
OWNER = SimpleNamespace()
#: Before 5.17, layers call a module instead of a function of transformers.
causal_conv1d_fn = modeling_qwen3_next.causal_conv1d_fn or modeling_qwen3_next.apply_mask_to_padding_states
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"


@pytest.fixture(params=["torch", "triton"])
def kernel(request):
    if request.param == "triton":
        pytest.importorskip("triton")
    return declared.kernel("causal_conv", "depthwise", request.param)


def operands(rows=1, positions=23, *, dtype=torch.float32, taps=4, channels=6):
    """The input as models have it (positions first in memory), weight and bias."""
    torch.manual_seed(0)
    x = torch.randn(rows, positions, channels).to(dtype).transpose(1, 2)
    return [x, torch.randn(channels, taps).to(dtype), torch.randn(channels).to(dtype)]


def bounds(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def compared(kernel, tensors, activation="silu", cu_seqlens=None):
    """Compare with the formula in float64, rounded to the dtype of the operands."""
    tensors = [each.to(DEVICE) for each in tensors]
    cu_seqlens = None if cu_seqlens is None else cu_seqlens.to(DEVICE)
    low = tensors[0].dtype

    def formula(x, weight, bias=None):
        wide = (None if each is None else each.double() for each in (x, weight, bias))
        return reference.depthwise(*wide, activation, cu_seqlens).to(low)

    def found(x, weight, bias=None):
        return kernel(x, weight, bias, activation, cu_seqlens)

    # The sum is rounded to the dtype of the weight in front of silu.
    assert_matches(found, formula, tensors, tolerance=1.5e-2 if low is torch.bfloat16 else 3e-6)


@pytest.mark.parametrize("activation", ["silu", None])
def test_samples_that_share_a_row(kernel, activation):
    compared(kernel, operands(), activation, bounds(LENGTHS))
    if kernel is in_torch.depthwise or GPU:
        compared(kernel, operands(dtype=torch.bfloat16), activation, bounds(LENGTHS))


@pytest.mark.parametrize("taps", [1, 2, 3, 7])
def test_other_kernels_without_a_bias(kernel, taps):
    if kernel is in_torch.depthwise or taps < 5:
        compared(kernel, operands(taps=taps)[:2], "silu", bounds(LENGTHS))


@pytest.mark.slow
def test_bits_do_not_change(kernel):
    def step():
        leaves = [each.to(DEVICE).detach().requires_grad_() for each in operands(2, 70)]
        output = kernel(*leaves, "silu", bounds([33, 60, 47]).to(DEVICE))
        output.square().sum().backward()
        return [output, *(each.grad for each in leaves)]

    assert all(map(torch.equal, step(), step()))


def test_samples_in_several_rows(kernel):
    compared(kernel, operands(2, 7), "silu", bounds([3, 4, 1, 6]))


def test_rows_longer_than_a_program(kernel):
    compared(kernel, operands(2, 70))


def test_another_layout(kernel):
    x, weight, bias = operands(2, 9)
    compared(kernel, [x.contiguous(), weight, bias], None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.skipif(modeling_qwen3_next.causal_conv1d_fn is None, reason="upstream has no such function")
def test_rows_of_torch_are_upstreams_bit_for_bit(dtype):
    sides = (lambda *each, f=f: f(*each, "silu") for f in (in_torch.depthwise, causal_conv1d_fn))
    assert_matches(*sides, operands(2, 9, dtype=dtype), exact=True)


def test_a_sample_does_not_depend_on_the_others(kernel):
    x, weight, bias = (each.to(DEVICE) for each in operands())
    whole = kernel(x, weight, bias, "silu", bounds(LENGTHS).to(DEVICE))
    x[:, :, :5] = 1e9
    changed = kernel(x, weight, bias, "silu", bounds(LENGTHS).to(DEVICE))
    assert torch.equal(whole[:, :, 5:], changed[:, :, 5:])
    assert not torch.equal(whole[:, :, :5], changed[:, :, :5])


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_what_is_refused(backend):
    refuses = declared.refusal("causal_conv", "depthwise", backend)

    def refused(
        x=None, weight=None, bias=None, activation="silu", cu_seqlens=None, upstream=causal_conv1d_fn
    ):
        given = [
            own if other is None else other for own, other in zip(operands(), (x, weight, bias), strict=True)
        ]
        return refuses(OWNER, *given, activation, cu_seqlens, upstream)

    x, _, bias = operands()
    assert refused() is None and refused(cu_seqlens=bounds(LENGTHS)) is None
    assert refused(x=x.bfloat16()) is None
    assert "do not divide 23 positions" in refused(cu_seqlens=bounds(LENGTHS[1:]))
    assert "the activation is gelu" in refused(activation="gelu")
    assert "the weight [5, 4]" in refused(weight=torch.zeros(5, 4))
    assert "the input is [6, 23]" in refused(x=torch.zeros(6, 23))
    assert "replaced by" in refused(upstream=compared)
    limits = {
        "the kernel has 5 taps, more than 4": {"weight": torch.zeros(6, 5)},
        "torch.float64": {"x": x.double()},
        "torch.float32": {"bias": bias.bfloat16()},
    }
    for reason, given in limits.items():
        assert refused(**given) is None if backend == "torch" else reason in refused(**given)


class TestTriton:
    @pytest.fixture
    def ours(self):
        pytest.importorskip("triton")
        from veomni_hook.kernels.causal_conv import triton

        return triton

    def test_channels_of_a_wider_projection_are_not_copied(self, ours, monkeypatch):
        wide = torch.randn(1, 9, 8).transpose(1, 2)
        monkeypatch.setattr(
            torch.Tensor, "contiguous", lambda x: x if x.dim() == 2 else pytest.fail("copied")
        )
        assert ours._by_position(wide[:, :6]).data_ptr() == wide.data_ptr()

    def test_no_positions(self, ours):
        x, *rest = operands(2, 9)
        compared(ours.depthwise, [x[:, :, :0], *rest], None)

    def test_the_layout_of_the_input_stays(self, ours):
        x, weight, _ = (each.to(DEVICE) for each in operands(2, 9))
        found = ours.depthwise(x, weight)
        assert found.shape == x.shape and found.stride(1) == 1

    @pytest.mark.skipif(not GPU, reason="needs a GPU")
    @pytest.mark.parametrize("packed", [False, True])
    def test_bfloat16_of_many_channels(self, ours, packed):
        tensors = operands(2, 300, dtype=torch.bfloat16, channels=1000)
        compared(ours.depthwise, tensors, "silu", bounds([100, 1, 199, 2, 298]) if packed else None)
