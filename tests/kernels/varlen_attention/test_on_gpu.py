"""Flash attention by segment on a GPU: equality with upstream's loop, and no waiting."""

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from tests.kernels.dispatched import without_waits
from tests.kernels.matching import assert_matches
from tests.kernels.varlen_attention.test_torch import LENGTHS, OPTIONS, OWNER, loop, operands, side
from veomni_hook.kernels.shared.host_values import note_copy
from veomni_hook.kernels.varlen_attention import flash
from veomni_hook.kernels.varlen_attention import torch as batched

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@pytest.mark.parametrize("width", [64, 72, 80, 128])
@pytest.mark.parametrize("kernel", [flash, batched])
@pytest.mark.parametrize("lengths", [each for each in LENGTHS.values() if sum(each)])
def test_equals_the_loop_over_segments(lengths, kernel, width):
    tensors, bounds = operands([40 * each for each in lengths], torch.bfloat16, 4, 4, width, width)
    tensors, bounds = [each.cuda() for each in tensors], bounds.cuda()
    assert flash.refuses(OWNER, *tensors, bounds, sdpa_attention_forward, OPTIONS) is None
    assert_matches(side(kernel, bounds), loop(bounds), tensors)


@pytest.mark.parametrize("kernel", [flash, batched])
def test_the_host_does_not_wait_for_known_boundaries(kernel):
    tensors, host = operands([64, 64, 32, 64], torch.bfloat16, 4, 4, 80, 80)
    tensors = [each.cuda().requires_grad_() for each in tensors]
    bounds = note_copy(host.cuda(), host)
    with without_waits():
        assert flash.refuses(OWNER, *tensors, bounds, sdpa_attention_forward, OPTIONS) is None
        kernel.full(*tensors, bounds, sdpa_attention_forward, OPTIONS).sum().backward()
