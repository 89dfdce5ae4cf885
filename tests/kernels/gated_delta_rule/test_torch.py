"""The chunked gated delta rule against the recurrence in float64, and against transformers' fallback."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from tests.kernels.matching import assert_matches, close
from veomni_hook.kernels.gated_delta_rule import operand_checks, reference
from veomni_hook.kernels.gated_delta_rule import torch as ours

#: Odd lengths, one position, no position, whole chunks and one more.
LENGTHS = [130, 1, 0, 64, 65, 7, 0]
OWNER = SimpleNamespace()


def operands(rows, positions, *, groups=2, dtype=torch.float32, samples=None, keys=2, widths=(8, 6)):
    """Query, key, value, g, beta and the initial state."""
    torch.manual_seed(0)
    heads, samples = keys * groups, samples or rows
    query, key = (torch.randn(rows, positions, keys, widths[0]) for _ in range(2))
    value = torch.randn(rows, positions, heads, widths[1])
    g, beta = -2 * torch.rand(rows, positions, heads) ** 2, torch.rand(rows, positions, heads)
    state = torch.randn(samples, heads, *widths)
    return [each.to(dtype) for each in (query, key, value, g, beta)] + [state]


def bounds(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def exact(*tensors, normalise=False, cu_seqlens=None):
    """The recurrence in float64, in the dtypes of the operands."""
    output, state = reference.scalar_decay(*(each.double() for each in tensors), True, normalise, cu_seqlens)
    return output.to(tensors[0].dtype), state.float()


def chunked(*tensors, normalise=False, cu_seqlens=None):
    return ours.scalar_decay(*tensors, True, normalise, cu_seqlens)


@pytest.mark.sample(2)
@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_samples_that_share_a_row(dtype, groups, normalise):
    tensors = operands(1, sum(LENGTHS), groups=groups, dtype=dtype, samples=len(LENGTHS))
    if not normalise:
        tensors[1] = tensors[1] / 4  # else the state grows without end
    given = {"normalise": normalise, "cu_seqlens": bounds(LENGTHS)}
    assert_matches(
        lambda *each: chunked(*each, **given),
        lambda *each: exact(*each, **given),
        tensors,
        tolerance=tolerance(dtype),
    )


def tolerance(dtype):
    # Gradients of bfloat16 operands are rounded once; g's come from sums over a whole sample.
    return 1e-2 if dtype is torch.bfloat16 else 2e-5


@pytest.mark.parametrize(("rows", "positions"), [(3, 70), (2, 64), (1, 1)])
def test_rows(rows, positions):
    assert_matches(
        lambda *each: chunked(*each, normalise=True),
        lambda *each: exact(*each, normalise=True),
        operands(rows, positions),
        tolerance=2e-5,
    )


def test_no_positions():
    tensors = operands(2, 0)
    output, state = ours.scalar_decay(*tensors, True)
    assert output.shape == (2, 0, 4, 6) and torch.equal(state, tensors[5])
    assert reference.scalar_decay(*tensors, True)[0].shape == (2, 0, 4, 6)


@pytest.mark.sample(2)
@pytest.mark.parametrize("g", [-40.0, -1e-7, 0.0])
@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_decays_and_betas_at_their_limits(g, beta):
    tensors = operands(1, 150, samples=2)
    tensors[3][:, ::2] = g
    tensors[4][:, ::3] = beta
    given = {"normalise": True, "cu_seqlens": bounds([81, 69])}
    # The sum over a chunk is -1280 here, of which float32 keeps 6e-5: as in upstream's code.
    tolerance = 1e-4 if g < -1 else 2e-5
    assert_matches(
        lambda *each: chunked(*each, **given),
        lambda *each: exact(*each, **given),
        tensors,
        tolerance=tolerance,
    )


def test_float64_stays_float64():
    tensors = [each.double() for each in operands(2, 70)]
    found, truth = (each(*tensors, True, True)[0] for each in (ours.scalar_decay, reference.scalar_decay))
    assert found.dtype == torch.float64
    close(found, truth, 1e-12)


def test_second_derivatives_pass_through_boundaries():
    tensors = [each.double().requires_grad_() for each in operands(1, 5, samples=2, keys=1, widths=(2, 3))]
    cu_seqlens = bounds([2, 3])
    assert torch.autograd.gradgradcheck(lambda *each: chunked(*each, cu_seqlens=cu_seqlens)[0], tensors)


def test_a_sample_does_not_depend_on_the_others():
    lengths = [70, 3, 90]
    tensors = operands(1, sum(lengths), samples=3)[:5]
    whole = ours.scalar_decay(*tensors, cu_seqlens=bounds(lengths))[0]
    for each in tensors:
        each[:, :70] = each[:, :70].flip(1)
    changed = ours.scalar_decay(*tensors, cu_seqlens=bounds(lengths))[0]
    assert torch.equal(whole[:, 70:], changed[:, 70:])
    assert not torch.equal(whole[:, :70], changed[:, :70])


def test_strides_do_not_matter():
    tensors = operands(2, 70)[:5]
    strided = [
        torch.stack((each, each), -1)[..., 0].transpose(0, 1).contiguous().transpose(0, 1) for each in tensors
    ]
    assert not strided[0].is_contiguous()
    assert torch.equal(ours.scalar_decay(*strided)[0], ours.scalar_decay(*tensors)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_upstreams(dtype):
    tensors = operands(2, 100, dtype=dtype)

    def upstream(*each):
        options = {"use_qk_l2norm_in_kernel": True, "output_final_state": True}
        return torch_chunk_gated_delta_rule(*each[:5], initial_state=each[5], **options)

    assert_matches(
        lambda *each: chunked(*each, normalise=True), upstream, tensors, tolerance=2 * tolerance(dtype)
    )


def test_autocast_does_not_reach_the_state():
    tensors = operands(1, 200)[:5]
    with torch.autocast("cpu", torch.bfloat16):
        inside = ours.scalar_decay(*tensors, None, True)
    outside = ours.scalar_decay(*tensors, None, True)
    assert all(map(torch.equal, inside, outside))


def refused(tensors, cu_seqlens=None, state=None, upstream=torch_chunk_gated_delta_rule):
    return operand_checks.refuses(OWNER, *tensors[:5], state, False, True, cu_seqlens, upstream)


def test_what_does_not_fit_is_refused():
    tensors = operands(1, 6)
    assert refused(tensors) is None
    assert refused(tensors, bounds([2, 4])) is None
    assert refused(tensors, bounds([2, 4]), torch.zeros(2, 4, 8, 6)) is None
    assert "do not divide 6 positions" in refused(tensors, bounds([2, 3]))
    assert "not in order" in refused(tensors, torch.tensor([0, 4, 2, 6]))
    assert "initial state is [1, 4, 8, 6], not [2, 4, 8, 6]" in refused(tensors, bounds([2, 4]), tensors[5])
    assert "replaced by" in refused(tensors, upstream=exact)
    for number, other in ((1, tensors[1][:, :5]), (2, tensors[2][:, :, :3]), (0, tensors[0].long())):
        assert refused([*tensors[:number], other, *tensors[number + 1 :]]), number
    assert "g and beta" in refused([*tensors[:3], tensors[3][..., :1], tensors[4]])
