"""The chunked rule, in both forms, against the recurrence in float64 and against transformers' fallback."""

import pytest
import torch

from tests.kernels.gated_delta_rule.forms import FORMS, OWNER, apart, bounds, carried, whole
from tests.kernels.matching import assert_matches, close

#: Odd lengths, one position, no position, whole chunks and one more.
LENGTHS = [130, 1, 0, 64, 65, 7, 0]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(params=FORMS, ids=repr)
def form(request):
    return request.param


def compared(form, tensors, tolerance=2e-5, normalise=True, cu_seqlens=None):
    assert_matches(
        lambda *each: form.chunked(*each, True, normalise, cu_seqlens),
        lambda *each: form.exact(*each, normalise=normalise, cu_seqlens=cu_seqlens),
        tensors,
        tolerance=tolerance,
    )


def tolerance(dtype):
    # Gradients of bfloat16 operands are rounded once; g's come from sums over a whole sample.
    return 1e-2 if dtype is torch.bfloat16 else 2e-5


@pytest.mark.sample(2)
@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_samples_that_share_a_row(form, dtype, normalise):
    tensors = form.operands(1, sum(LENGTHS), dtype=dtype, samples=len(LENGTHS))
    if not normalise:
        tensors[1] = tensors[1] / 4  # else the state grows without end
    compared(form, tensors, tolerance(dtype), normalise, bounds(LENGTHS))


@pytest.mark.parametrize(("rows", "positions"), [(3, 70), (2, 64), (1, 1)])
def test_rows(form, rows, positions):
    compared(form, form.operands(rows, positions, groups=1 if rows == 2 else None))


def test_no_positions(form):
    tensors = form.operands(2, 0)
    output, state = form.chunked(*tensors, True)
    assert output.shape == tensors[2].shape and torch.equal(state, tensors[5])
    assert form.truth(*tensors, True)[0].shape == tensors[2].shape


@pytest.mark.parametrize(
    ("g", "beta"), [(-2000.0, 1.0), (-40.0, 0.0), (-40.0, 1.0), (-1e-7, 1.0), (0.0, 0.0)]
)
def test_decays_and_betas_at_their_limits(form, g, beta):
    """Beside other decays, so that the sum over a chunk is large where a few positions still read others."""
    tensors = form.at_limits(form.operands(1, 150, samples=2), g, beta)
    # Of a scalar decay's sum over a chunk, -2e4, float32 keeps 1e-3: as in upstream's code.
    limit = 2e-5 if form.channels else {-2000.0: 2e-3, -40.0: 1e-4}.get(g, 2e-5)
    compared(form, tensors, limit, cu_seqlens=bounds([81, 69]))


def test_float64_stays_float64(form):
    tensors = [each.double() for each in form.operands(2, 70)]
    found, truth = (each(*tensors, True, True)[0] for each in (form.chunked, form.truth))
    assert found.dtype == torch.float64
    close(found, truth, 1e-12)


@pytest.mark.parametrize("form", FORMS[:1], ids=repr)  # what passes boundaries knows no decays
def test_second_derivatives_pass_through_boundaries(form):
    tensors = [
        each.double().requires_grad_() for each in form.operands(1, 5, samples=2, keys=1, widths=(2, 3))
    ]
    rest = (True, False, bounds([2, 3]))
    assert torch.autograd.gradgradcheck(lambda *each: form.chunked(*each, *rest)[0], tensors)


def test_a_sample_does_not_depend_on_the_others(form):
    lengths = [70, 3, 90]
    tensors = form.operands(1, sum(lengths), samples=3)[:5]
    one = form.chunked(*tensors, cu_seqlens=bounds(lengths))[0]
    for each in tensors:
        each[:, :70] = each[:, :70].flip(1)
    changed = form.chunked(*tensors, cu_seqlens=bounds(lengths))[0]
    assert torch.equal(one[:, 70:], changed[:, 70:])
    assert not torch.equal(one[:, :70], changed[:, :70])


def test_strides_do_not_matter(form):
    tensors = form.operands(2, 70)[:5]
    strided = [
        torch.stack((each, each), -1)[..., 0].transpose(0, 1).contiguous().transpose(0, 1) for each in tensors
    ]
    assert not strided[0].is_contiguous()
    assert torch.equal(form.chunked(*strided)[0], form.chunked(*tensors)[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_upstreams(form, dtype):
    def upstream(*each):
        options = {"use_qk_l2norm_in_kernel": True, "output_final_state": True}
        return form.upstream(*each[:5], initial_state=each[5], **options)

    assert_matches(
        lambda *each: form.chunked(*each, True, True),
        upstream,
        form.operands(2, 100, dtype=dtype, keys=4, groups=1),  # 5.9 repeats key heads before the call
        tolerance=2 * tolerance(dtype),
    )


def test_autocast_does_not_reach_the_state(form):
    tensors = form.operands(1, 200)[:5]
    with torch.autocast("cpu", torch.bfloat16):
        inside = form.chunked(*tensors, None, True)
    assert all(map(torch.equal, inside, form.chunked(*tensors, None, True)))


def test_what_does_not_fit_is_refused(form):
    tensors = form.operands(1, 6)
    heads = tensors[2].shape[2]

    def refused(tensors, cu_seqlens=None, state=None, upstream=form.upstream):
        return form.refuses(OWNER, *tensors[:5], state, False, True, cu_seqlens, upstream)

    def instead(number, other):
        return refused([*tensors[:number], other, *tensors[number + 1 :]])

    assert refused(tensors) is refused(tensors, bounds([2, 4])) is None
    assert refused(tensors, bounds([2, 4]), torch.zeros(2, heads, 8, 6)) is None
    assert "do not divide 6 positions" in refused(tensors, bounds([2, 3]))
    assert "not in order" in refused(tensors, torch.tensor([0, 4, 2, 6]))
    expected = f"initial state is [1, {heads}, 8, 6], not [2, {heads}, 8, 6]"
    assert expected in refused(tensors, bounds([2, 4]), tensors[5])
    assert "replaced by" in refused(tensors, upstream=bounds)
    assert "no floating-point tensor" in instead(0, tensors[0].long())
    if form.channels:
        for number, other in ((3, tensors[3][..., 0]), (0, tensors[0][:, :, :1]), (3, tensors[3][..., :1])):
            assert "query, value and g are" in instead(number, other), number
    else:
        for number, other in ((1, tensors[1][:, :5]), (2, tensors[2][:, :, :3])):
            assert "query, key and value are" in instead(number, other), number
        assert "g and beta" in instead(3, tensors[3][..., :1])


@pytest.mark.parametrize("cut", [1, 64, 65, 130])
def test_a_state_that_the_next_call_goes_on_with(form, cut):
    tensors = form.operands(1, 300)
    close(carried(form.chunked, tensors, cut), whole(form.chunked, tensors), 1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_change(form, dtype):
    tensors = form.operands(2, 200, dtype=dtype)
    assert all(map(torch.equal, whole(form.chunked, tensors), whole(form.chunked, tensors)))


@pytest.mark.slow
def test_sixteen_samples_of_1024_positions_are_separate_ones(form):
    tensors = form.operands(1, 16 * 1024, samples=16)
    packed = whole(form.chunked, tensors, torch.arange(17) * 1024)
    close(packed, apart(form.chunked, tensors, 1024), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_32768_positions_do_not_drift(form, dtype):
    """Decays near 1, so that a state remembers thousands of positions."""
    tensors = form.operands(1, 32768, dtype=dtype, widths=(16, 16), keys=2 // form.groups)
    tensors[3] = tensors[3] / 100
    output, state = form.chunked(*tensors, True, True)
    expected, last = form.truth(*(each.double() for each in tensors), True, True)
    limit = 2e-6 if dtype is torch.float32 else 1e-2
    close(output[:, -1000:], expected[:, -1000:], limit)
    close(output, expected, limit)
    close(state, last, limit)


def test_equal_decays_of_channels_are_the_rule_with_one(form):
    query, key, value, _, beta, state = FORMS[1].operands(2, 70)
    g = -torch.rand(2, 70, 2)
    decays = g[..., None].expand(query.shape) if form.channels else g
    found = form.truth(query, key, value, decays, beta, state)[0]
    close(found, FORMS[0].truth(query, key, value, g, beta, state)[0], 1e-6)
