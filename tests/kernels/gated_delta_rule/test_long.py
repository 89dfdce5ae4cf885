"""Long sequences: no drift, samples beside each other, states that calls hand on, and equal bits of two runs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.kernels.gated_delta_rule import test_channels as by_channel
from tests.kernels.gated_delta_rule import test_torch as by_head
from tests.kernels.matching import close
from veomni_hook.kernels.gated_delta_rule import reference
from veomni_hook.kernels.gated_delta_rule import torch as chunked

FORMS = {
    "a decay for each head": SimpleNamespace(
        rule=chunked.scalar_decay, truth=reference.scalar_decay, operands=by_head.operands, heads={"keys": 1}
    ),
    "a decay for each channel": SimpleNamespace(
        rule=chunked.channel_decay, truth=reference.channel_decay, operands=by_channel.operands, heads={}
    ),
}


@pytest.fixture(params=FORMS)
def form(request):
    return FORMS[request.param]


def results(leaves, output, state):
    """Output, state, and the gradients of a sum over both."""
    torch.manual_seed(2)
    (output * torch.randn_like(output)).sum().add((state * torch.randn_like(state)).sum()).backward()
    return [output.detach(), state.detach(), *(each.grad for each in leaves)]


def whole(rule, tensors, cu_seqlens=None):
    leaves = [each.clone().requires_grad_() for each in tensors]
    return results(leaves, *rule(*leaves, True, True, cu_seqlens))


def carried(rule, tensors, cut):
    """Two calls, the second with the state of the first."""
    leaves = [each.clone().requires_grad_() for each in tensors]
    first, state = rule(*(each[:, :cut] for each in leaves[:5]), leaves[5], True, True)
    second, state = rule(*(each[:, cut:] for each in leaves[:5]), state, True, True)
    return results(leaves, torch.cat((first, second), 1), state)


def apart(rule, tensors, length):
    """A call for each sample of one row."""
    leaves = [each.clone().requires_grad_() for each in tensors]
    count = tensors[0].shape[1] // length
    outputs, states = [], []
    for number in range(count):
        row = (each[:, number * length : (number + 1) * length] for each in leaves[:5])
        output, state = rule(*row, leaves[5][number : number + 1], True, True)
        outputs.append(output)
        states.append(state)
    return results(leaves, torch.cat(outputs, 1), torch.cat(states))


def agree(found, expected, tolerance):
    for each, truth in zip(found, expected, strict=True):
        close(each, truth, tolerance)


@pytest.mark.parametrize("cut", [1, 64, 65, 130])
def test_a_state_that_the_next_call_goes_on_with(cut, form):
    tensors = form.operands(1, 300)
    agree(carried(form.rule, tensors, cut), whole(form.rule, tensors), 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_do_not_change(dtype, form):
    tensors = form.operands(2, 200, dtype=dtype)
    assert all(map(torch.equal, whole(form.rule, tensors), whole(form.rule, tensors)))


@pytest.mark.slow
def test_sixteen_samples_of_1024_positions_are_separate_ones(form):
    tensors = form.operands(1, 16 * 1024, samples=16)
    packed = whole(form.rule, tensors, torch.arange(17) * 1024)
    agree(packed, apart(form.rule, tensors, 1024), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_32768_positions_do_not_drift(dtype, form):
    """Decays near 1, so that a state remembers thousands of positions."""
    tensors = form.operands(1, 32768, dtype=dtype, widths=(16, 16), **form.heads)
    tensors[3] = tensors[3] / 100
    output, state = form.rule(*tensors, True, True)
    expected, last = form.truth(*(each.double() for each in tensors), True, True)
    tolerance = 2e-6 if dtype is torch.float32 else 1e-2
    close(output[:, -1000:], expected[:, -1000:], tolerance)
    close(output, expected, tolerance)
    close(state, last, tolerance)
