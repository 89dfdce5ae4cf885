"""The chunked rule with a decay for each channel against the recurrence in float64, and against upstream."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.kernels.matching import assert_matches, close
from veomni_hook.kernels.gated_delta_rule import operand_checks, reference
from veomni_hook.kernels.gated_delta_rule.torch import channel_decay

kimi = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")

#: Odd lengths, one position, no position, whole chunks and one more.
LENGTHS = [130, 1, 0, 64, 65, 7, 0]


def operands(rows, positions, *, dtype=torch.float32, samples=None, heads=2, widths=(8, 6)):
    """Query, key, value, g, beta and the initial state."""
    torch.manual_seed(0)
    query, key = (torch.randn(rows, positions, heads, widths[0]) for _ in range(2))
    value = torch.randn(rows, positions, heads, widths[1])
    g, beta = -2 * torch.rand(query.shape) ** 2, torch.rand(rows, positions, heads)
    state = torch.randn(samples or rows, heads, *widths)
    return [each.to(dtype) for each in (query, key, value, g, beta)] + [state]


def bounds(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def exact(*tensors, normalise=True, cu_seqlens=None):
    """The recurrence in float64, in the dtypes of the operands."""
    output, state = reference.channel_decay(*(each.double() for each in tensors), True, normalise, cu_seqlens)
    return output.to(tensors[0].dtype), state.float()


def chunked(*tensors, normalise=True, cu_seqlens=None):
    return channel_decay(*tensors, True, normalise, cu_seqlens)


def agree(tensors, tolerance=2e-5, **given):
    assert_matches(
        lambda *each: chunked(*each, **given),
        lambda *each: exact(*each, **given),
        tensors,
        tolerance=tolerance,
    )


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_samples_that_share_a_row(dtype, normalise):
    tensors = operands(1, sum(LENGTHS), dtype=dtype, samples=len(LENGTHS))
    if not normalise:
        tensors[1] = tensors[1] / 4  # else the state grows without end
    tolerance = 1e-2 if dtype is torch.bfloat16 else 2e-5
    agree(tensors, tolerance, normalise=normalise, cu_seqlens=bounds(LENGTHS))


@pytest.mark.parametrize(("rows", "positions"), [(3, 70), (2, 64), (1, 1)])
def test_rows(rows, positions):
    agree(operands(rows, positions))


@pytest.mark.parametrize("g", [-2000.0, -40.0, -1e-7, 0.0])
def test_decays_at_their_limits(g):
    """Beside other decays, so that the sum over a chunk is large where a few positions still read others."""
    tensors = operands(1, 150, samples=2)
    tensors[3][:, ::5] = g
    tensors[3][:, 1::7, :, :4] = g
    tensors[4][:, ::3] = 1.0
    agree(tensors, cu_seqlens=bounds([81, 69]))


def test_float64_stays_float64():
    tensors = [each.double() for each in operands(2, 70)]
    found, truth = (each(*tensors, True, True)[0] for each in (channel_decay, reference.channel_decay))
    assert found.dtype == torch.float64
    close(found, truth, 1e-12)


def test_equal_decays_of_channels_are_the_rule_with_one():
    query, key, value, _, beta, state = operands(2, 70)
    g = -torch.rand(2, 70, 2)
    found = reference.channel_decay(query, key, value, g[..., None].expand(query.shape), beta, state)[0]
    close(found, reference.scalar_decay(query, key, value, g, beta, state)[0], 1e-6)


def test_no_positions():
    tensors = operands(2, 0)
    output, state = channel_decay(*tensors, True)
    assert output.shape == (2, 0, 2, 6) and torch.equal(state, tensors[5])


def test_rows_are_upstreams():
    def upstream(*each):
        options = {"use_qk_l2norm_in_kernel": True, "output_final_state": True}
        return kimi.chunk_kimi_delta_attention(*each[:5], initial_state=each[5], **options)

    assert_matches(chunked, upstream, operands(2, 100), tolerance=4e-5)


def test_autocast_does_not_reach_the_state():
    tensors = operands(1, 200)[:5]
    with torch.autocast("cpu", torch.bfloat16):
        inside = channel_decay(*tensors, None, True)
    assert all(map(torch.equal, inside, channel_decay(*tensors, None, True)))


def refused(tensors, cu_seqlens=None, state=None, upstream=kimi.chunk_kimi_delta_attention):
    given = (*tensors[:5], state, False, True, cu_seqlens, upstream)
    return operand_checks.refuses_channels(SimpleNamespace(), *given)


def test_what_does_not_fit_is_refused():
    tensors = operands(1, 6)
    assert refused(tensors) is None
    assert refused(tensors, bounds([2, 4]), torch.zeros(2, 2, 8, 6)) is None
    assert "do not divide 6 positions" in refused(tensors, bounds([2, 3]))
    assert "replaced by" in refused(tensors, upstream=exact)
    for number, other in ((3, tensors[3][..., 0]), (0, tensors[0][:, :, :1]), (3, tensors[3][..., :1])):
        assert "query, value and g are" in refused([*tensors[:number], other, *tensors[number + 1 :]]), number
