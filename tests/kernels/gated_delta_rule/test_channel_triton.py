"""Triton's rule with a decay for each channel against the recurrence in float64: interpreted, or on a GPU.

The interpreter computes in float32, and in float16, of which it multiplies matrices. On a GPU there are more
sizes, and bfloat16.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.declared import refusal
from tests.kernels.gated_delta_rule.test_channels import bounds, exact, operands
from tests.kernels.gated_delta_rule.test_long import agree, carried, whole
from tests.kernels.matching import assert_matches
from veomni_hook.kernels.gated_delta_rule import torch as chunked
from veomni_hook.kernels.gated_delta_rule import triton as ours

kimi = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
#: float32 is for the interpreter: it does not fit into a GPU's shared memory.
DTYPE, TOLERANCE = (torch.float16, 1e-2) if GPU else (torch.float32, 2e-5)
#: One position, none, a whole chunk, and one more.
LENGTHS = [65, 1, 0, 64]
on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not GPU, reason="needs a GPU")]

refuses = refusal("gated_delta_rule", "channel_decay", "triton")


def compared(tensors, tolerance=TOLERANCE, normalise=True, cu_seqlens=None, truth=exact):
    tensors = [each.to(DEVICE) for each in tensors]
    cu_seqlens = None if cu_seqlens is None else cu_seqlens.to(DEVICE)
    assert_matches(
        lambda *each: ours.channel_decay(*each, True, normalise, cu_seqlens),
        lambda *each: truth(*each, normalise=normalise, cu_seqlens=cu_seqlens),
        tensors,
        tolerance=tolerance,
    )


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "normalise"), [(DTYPE, True), (DTYPE, False), (torch.float16, True)])
def test_samples_that_share_a_row(dtype, normalise):
    tensors = operands(1, sum(LENGTHS), dtype=dtype, samples=len(LENGTHS), heads=1, widths=(20, 12))
    if not normalise:
        tensors[1] = tensors[1] / 8  # else the state grows without end
    compared(tensors, TOLERANCE if dtype is DTYPE else 1e-2, normalise, bounds(LENGTHS))


@pytest.mark.sample(1)
@pytest.mark.parametrize(("rows", "positions", "widths"), [(2, 66, (8, 6)), (1, 1, (8, 6)), (1, 3, (72, 20))])
def test_rows(rows, positions, widths):
    """Also with channels in several parts, the last of them not full."""
    compared(operands(rows, positions, dtype=DTYPE, heads=rows, widths=widths))


@pytest.mark.sample(1)
@pytest.mark.parametrize(("g", "beta"), [(-2000.0, 1.0), (-40.0, 0.0), (-1e-7, 1.0), (0.0, 0.0)])
def test_decays_and_betas_at_their_limits(g, beta):
    """Beside other decays, so that the sum over a chunk is large where a few positions still read others."""
    tensors = operands(1, 102, samples=2, heads=1, dtype=DTYPE)
    tensors[3][:, ::5] = g
    tensors[3][:, 1::7, :, :4] = g
    tensors[4][:, ::3] = beta
    compared(tensors, cu_seqlens=bounds([33, 69]))


def test_nothing_is_left_of_what_is_forgotten():
    """A decay of 0 has a logarithm without end, of which no difference can be taken."""
    tensors = operands(1, 40, heads=1, dtype=DTYPE)
    tensors[3][:, 17] = float("-inf")
    output, state = ours.channel_decay(*(each.to(DEVICE) for each in tensors), True, True)
    behind = [each[:, 17:].to(DEVICE) for each in tensors[:5]]
    expected, last = chunked.channel_decay(*behind, None, True, True)
    torch.testing.assert_close(output[:, 17:], expected, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(state, last, rtol=0, atol=TOLERANCE)


@pytest.mark.slow
def test_a_state_that_the_next_call_goes_on_with():
    tensors = [each.to(DEVICE) for each in operands(1, 80, heads=1, dtype=DTYPE)]
    agree(carried(ours.channel_decay, tensors, 65), whole(ours.channel_decay, tensors), TOLERANCE)


@pytest.mark.slow
def test_bits_do_not_change():
    tensors = [each.to(DEVICE) for each in operands(1, 70, heads=1, dtype=torch.float16)]
    assert all(map(torch.equal, whole(ours.channel_decay, tensors), whole(ours.channel_decay, tensors)))


def test_no_positions():
    tensors = [each.to(DEVICE).requires_grad_() for each in operands(2, 0, dtype=torch.float16)]
    output, state = ours.channel_decay(*tensors, True)
    assert output.shape == (2, 0, 2, 6) and torch.equal(state, tensors[5])
    state.sum().backward()
    assert torch.equal(tensors[5].grad, torch.ones_like(tensors[5])) and tensors[3].grad.shape == (2, 0, 2, 8)


def test_what_is_not_wanted_is_not_computed():
    """Without an initial state or a gradient of the output; strides as those of a split projection."""
    query, key, value, g, beta, _ = (
        each.to(DEVICE) for each in operands(1, 66, dtype=torch.float16, heads=1)
    )
    together = torch.cat((query, key, value, g), dim=3).requires_grad_()
    output, state = ours.channel_decay(*together.split((8, 8, 6, 8), dim=3), beta, None, True, True)
    state.sum().backward()
    truth = together.detach().requires_grad_()
    split = truth.split((8, 8, 6, 8), dim=3)
    expected, last = chunked.channel_decay(*split, beta, None, True, True)
    last.sum().backward()
    torch.testing.assert_close(output, expected, rtol=0, atol=3e-3)
    torch.testing.assert_close(together.grad, truth.grad, rtol=0, atol=3e-3)
    assert ours.channel_decay(*split, beta)[1] is None


def test_refusals():
    def refused(dtype=torch.bfloat16, widths=(8, 6), g=None):
        *tensors, _ = operands(1, 3, dtype=dtype, widths=widths)
        tensors[3] = tensors[3].float() if g is None else g
        given = (*tensors, None, False, True, None, kimi.chunk_kimi_delta_attention)
        return refuses(SimpleNamespace(), *given)

    assert refused() is None and refused(torch.float16) is None
    assert refused(widths=(264, 6)) == "heads of 264 and 6 are wider than 256"
    assert "torch.float32, torch.float32" in refused(torch.float32)
    assert "query, value and g are" in refused(g=torch.zeros(1, 3, 2))


class TestOnGPU:
    pytestmark = on_gpu

    @pytest.mark.parametrize(
        ("heads", "widths", "lengths"),
        [
            (4, (128, 128), [70, 1, 0, 129, 200]),
            (2, (64, 128), [300]),
            (2, (64, 64), [300]),
            (2, (96, 80), [64, 64, 3]),
            (2, (256, 64), [200]),
            (1, (256, 256), [130]),
        ],
    )
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_sizes(self, dtype, heads, widths, lengths):
        tensors = operands(1, sum(lengths), heads=heads, dtype=dtype, samples=len(lengths), widths=widths)
        tensors[3] = tensors[3].float()
        compared(tensors, 2e-2 if dtype is torch.bfloat16 else 4e-3, True, bounds(lengths))

    def test_a_long_sample_does_not_drift(self):
        tensors = operands(1, 16384, dtype=torch.bfloat16, heads=1, widths=(128, 128))

        def truth(*each, normalise, cu_seqlens):
            output, state = chunked.channel_decay(*(t.double() for t in each), True, normalise, cu_seqlens)
            return output.to(each[0].dtype), state.float()

        compared(tensors, 2e-2, truth=truth)

    def test_bits_do_not_change(self):
        tensors = [each.to(DEVICE) for each in operands(2, 200, dtype=torch.bfloat16, widths=(128, 128))]

        def step():
            leaves = [each.detach().clone().requires_grad_() for each in tensors]
            output, state = ours.channel_decay(*leaves, True, True)
            (output.float().square().sum() + state.square().sum()).backward()
            return [output, state, *(each.grad for each in leaves)]

        for _ in range(3):
            assert all(map(torch.equal, step(), step()))
