"""Values of tensors on the host: copied once, noted, or derived; on a device without data of its own."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
import torch

from veomni_hook.kernels.shared import host_values
from veomni_hook.kernels.shared.host_values import (
    derived,
    host_copies,
    host_copy,
    known_copy,
    known_derived,
    note_copy,
    note_number,
    note_origin,
)


def elsewhere(*size: int) -> torch.Tensor:
    """A tensor of another device; reading it raises."""
    return torch.empty(size, device="meta", dtype=torch.int64)


def test_a_tensor_of_the_cpu_is_its_own_copy():
    tensor = torch.arange(3)
    assert host_copy(tensor) is tensor
    assert known_copy(tensor) is tensor


def test_what_was_noted_is_not_read():
    tensor, values = elsewhere(2), torch.tensor([3, 4])
    assert known_copy(tensor) is None
    with pytest.raises(NotImplementedError):
        host_copy(tensor)
    assert note_copy(tensor, values) is tensor
    assert host_copy(tensor) is values
    host_copies(tensor, tensor)


def test_a_tensor_that_was_changed_in_place_is_read_again():
    tensor = elsewhere(2)
    note_copy(tensor, torch.tensor([3, 4]))
    tensor.add_(1)
    assert known_copy(tensor) is None


def test_parts_of_a_known_tensor_are_known():
    whole, values = elsewhere(4, 2, 3), torch.arange(24).view(4, 2, 3)
    note_copy(whole, values)
    for part, expected in (
        (whole[0], values[0]),
        (whole[1:, 1], values[1:, 1]),
        (whole[2].expand(5, 2, 3)[1], values[2]),
        (whole.transpose(0, 2)[..., 1:], values.transpose(0, 2)[..., 1:]),
    ):
        assert known_copy(part).tolist() == expected.tolist()
        assert host_copy(part).tolist() == expected.tolist()
    part = whole[0]
    whole.add_(1)
    assert known_copy(part) is None


def test_parts_of_a_tensor_in_another_order_or_dtype_are_not_known():
    whole = torch.empty(3, 2, dtype=torch.int64, device="meta").t()
    assert known_copy(note_copy(whole, torch.zeros(2, 3, dtype=torch.int64))[0]) is None
    assert known_copy(note_copy(elsewhere(4), torch.zeros(4)).view(torch.int32)) is None
    with torch.inference_mode():
        assert known_copy(note_copy(elsewhere(4), torch.zeros(4))[1:]) is None


def test_nothing_is_kept_after_the_tensor():
    tensor = elsewhere(2)
    note_copy(tensor, torch.tensor([3, 4]))
    held = len(host_values._KNOWN)
    del tensor
    gc.collect()
    assert len(host_values._KNOWN) == held - 1


def test_values_are_derived_once():
    calls = []

    def total(values: torch.Tensor, factor: int) -> int:
        calls.append(factor)
        return int(values.sum()) * factor

    tensor = torch.tensor([1, 2])
    assert [derived(tensor, total, factor) for factor in (2, 2, 3)] == [6, 6, 9]
    assert calls == [2, 3]
    tensor += 1
    assert derived(tensor, total, 2) == 10


def test_a_number_is_waited_for_when_it_is_asked_for():
    waits = []
    copied = SimpleNamespace(synchronize=lambda: waits.append(1))
    tensor = elsewhere(2)
    host_values.note_derived(tensor, host_values._Coming(torch.tensor(3), copied), len)
    assert waits == []
    assert [known_derived(tensor, len), derived(tensor, len), known_derived(tensor, len)] == [3, 3, 3]
    assert waits == [1]
    tensor.add_(1)
    assert known_derived(tensor, len) is None


def test_a_number_of_the_cpu_is_known():
    tensor = elsewhere(2)
    note_number(tensor, torch.tensor(3), len)
    assert known_derived(tensor, len) == 3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_number_of_the_device_arrives_before_what_the_device_does_next():
    tensor = torch.zeros(2, device="cuda")
    note_number(tensor, torch.full((), 3, device="cuda"), len)
    busy, done = torch.randn(8192, 8192, device="cuda"), torch.cuda.Event()
    for _ in range(50):
        busy = busy @ busy
    done.record()
    assert known_derived(tensor, len) == 3
    assert not done.query()


def test_an_origin_is_read_when_the_result_is():
    one, other, result = elsewhere(2), elsewhere(2), elsewhere(2)
    assert note_origin(result, torch.add, one, other) is result
    assert known_copy(result) is None
    note_copy(one, torch.tensor([1, 2]))
    assert known_copy(result) is None
    note_copy(other, torch.tensor([3, 4]))
    assert known_copy(result).tolist() == [4, 6]
    assert host_copy(result).tolist() == [4, 6]


def test_an_origin_that_was_changed_since_is_not_read():
    origin, result = elsewhere(2), elsewhere(2)
    note_copy(origin, torch.tensor([1, 2]))
    note_origin(result, torch.neg, origin)
    origin.add_(1)
    note_copy(origin, torch.tensor([2, 3]))
    assert known_copy(result) is None
    with pytest.raises(NotImplementedError):
        host_copy(result)


def test_what_was_read_of_an_inference_tensor_is_not_kept():
    with torch.inference_mode():
        tensor = torch.tensor([1, 2])
        assert derived(tensor, torch.Tensor.tolist) == [1, 2]
        tensor += 1
        assert derived(tensor, torch.Tensor.tolist) == [2, 3]
        noted = elsewhere(2)
    note_copy(noted, torch.tensor([3, 4]))
    assert host_copy(noted).tolist() == [3, 4]
