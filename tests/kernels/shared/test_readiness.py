"""Work on a tensor that is ready before its stream is."""

import copy
import io

import pytest
import torch

from veomni_hook.kernels.shared import readiness
from veomni_hook.kernels.shared.readiness import as_soon_as_ready, note_ready


def test_without_a_note_it_is_a_call():
    tensor = torch.ones(2**20)
    note_ready(None)
    note_ready(tensor)
    assert as_soon_as_ready(torch.clone, tensor).equal(tensor)


def test_a_noted_tensor_is_copied_and_saved_without_its_note():
    tensor = torch.ones(3)
    tensor._veomni_ready = readiness._Ready(object(), tensor._version)
    kept = io.BytesIO()
    torch.save(tensor, kept)
    kept.seek(0)
    for other in (copy.deepcopy(tensor), torch.load(kept)):
        assert as_soon_as_ready(torch.clone, other).equal(tensor)
    tensor.add_(1)  # as autograd adds up gradients: the note is of what was
    assert as_soon_as_ready(torch.clone, tensor).equal(torch.full((3,), 2.0))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_work_does_not_wait_for_what_the_stream_does_next():
    first, other = torch.ones(2**20, device="cuda"), torch.ones(3, device="cuda")
    note_ready(first, other)
    # To load code, and to get the first memory of a stream, waits for the device.
    as_soon_as_ready(lambda tensor: tensor * 2, first)
    torch.cuda.synchronize()
    busy, done = torch.randn(8192, 8192, device="cuda"), torch.cuda.Event()
    for _ in range(50):
        busy = busy @ busy
    done.record()
    streams, ends = [], []

    def doubled(tensor):
        streams.append(torch.cuda.current_stream())
        result = tensor * 2
        ends.append(torch.cuda.Event())
        ends[-1].record()
        ends[-1].synchronize()
        return result

    results = [as_soon_as_ready(doubled, tensor) for tensor in (first, other)]
    assert not done.query()
    assert torch.cuda.current_stream() not in streams
    assert all((result == 2).all() for result in results)
    assert as_soon_as_ready(doubled, first + 1).eq(4).all()
    assert streams[-1] == torch.cuda.current_stream()
