"""Checks of counts: upstream's own on a CPU, and assertions on a GPU, which fake tensors stand for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from transformers.utils import torch_compilable_check

from veomni_hook.kernels.shared.operand_checks import count_as_plain
from veomni_hook.multimodal import counts


@pytest.fixture
def on_gpu():
    """Tensors of a GPU that have no values, so that reading one is an error."""
    with FakeTensorMode():
        yield


@pytest.fixture
def asserted(monkeypatch):
    """What is asserted on a device."""
    found: list[tuple[torch.Tensor, str]] = []
    monkeypatch.setattr(torch, "_assert_async", lambda condition, message: found.append((condition, message)))
    return found


def text(n, features):
    return lambda n=n: f"tokens: {n}, features: {features.shape[0]}"


def test_on_a_cpu_the_error_is_upstreams(asserted):
    n, features = torch.tensor(3), torch.randn(4, 8)
    said = []
    for call in (
        lambda: torch_compilable_check(
            n * 8 == features.numel(), f"tokens: {n}, features: {features.shape[0]}"
        ),
        lambda: counts.check(torch_compilable_check, n * 8 == features.numel(), text(n, features)),
    ):
        with pytest.raises(ValueError, match="tokens: 3, features: 4") as caught:
            call()
        said.append(str(caught.value))
    assert said[0] == said[1] and not asserted
    counts.check(torch_compilable_check, (n + 1) * 8 == features.numel(), text(n, features))


@pytest.mark.parametrize("value", [True, False])
def test_a_bool_is_checked_on_the_host(asserted, value):
    if value:
        counts.check(torch_compilable_check, value, lambda: "no")
    else:
        with pytest.raises(ValueError, match="no"):
            counts.check(torch_compilable_check, value, lambda: "no")
    assert not asserted


def test_on_a_gpu_it_is_asserted_there(on_gpu, asserted):
    n = (torch.empty(2, 6, device="cuda") > 0).sum()
    features = torch.empty(4, 8, device="cuda")
    with pytest.raises(
        DataDependentOutputException, match="_local_scalar_dense"
    ):  # upstream reads the number
        torch_compilable_check(n * 8 == features.numel(), f"tokens: {n}")
    counts.check(torch_compilable_check, n * 8 == features.numel(), text(n, features))
    ((condition, message),) = asserted
    assert condition.is_cuda and condition.shape == () and condition.dtype is torch.bool
    assert message == "tokens: on the device, features: 4"


def test_numbers_that_the_host_knows_and_conditions_of_several_elements(on_gpu, asserted):
    several, count = torch.empty(6, device="cuda") > 0, 12
    n = several.sum()
    counts.check(torch_compilable_check, n == count, lambda n=n, count=count: f"{n} and {count}")
    counts.check(torch_compilable_check, several, lambda: "text")
    assert asserted[0][1] == "on the device and 12" and asserted[1][0].shape == ()


@pytest.mark.parametrize(("disabled", "number"), [("1", 0), ("0", 1)])
def test_the_switch_of_transformers(on_gpu, asserted, monkeypatch, disabled, number):
    monkeypatch.setenv("TRANSFORMERS_DISABLE_TORCH_CHECK", disabled)
    counts.check(torch_compilable_check, torch.empty((), device="cuda") > 0, lambda: "text")
    assert len(asserted) == number


@pytest.mark.parametrize("hip", [True, False], ids=["ROCm", "a check of the user"])
def test_what_else_calls_upstreams(on_gpu, asserted, monkeypatch, hip):
    called: list[tuple[Any, str]] = []

    def own(condition: Any, message: str) -> None:
        called.append((condition, message))

    if hip:
        monkeypatch.setattr(torch.version, "hip", "6.0")
    counts.check(own, torch.empty((), device="cuda") > 0, lambda n=2: f"text {n}")
    assert [message for _, message in called] == ["text 2"] and not asserted


def test_in_compiled_code_upstreams_function_runs(on_gpu, asserted, monkeypatch):
    """Dynamo traces it there: tests of models compile the check."""
    called: list[str] = []
    monkeypatch.setattr(counts, "written_in", lambda function: counts._UPSTREAM)
    condition = torch.empty((), device="cuda") > 0
    for compiling in (True, False):
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda compiling=compiling: compiling)
        counts.check(lambda _, message: called.append(message), condition, lambda n=2: f"text {n}")
        assert (len(called), len(asserted)) == ((1, 0) if compiling else (1, 1))


MASKS = {
    "of rows": lambda: torch.arange(12).view(2, 6) % 2 == 1,
    "of elements": lambda: torch.arange(96).view(2, 6, 8) % 3 == 1,
    "expanded": lambda: (torch.arange(12).view(2, 6, 1) % 2 == 1).expand(2, 6, 8),
    "no mask": lambda: torch.tensor([0, 1, 1]),
}


@pytest.mark.parametrize("pretended", [False, True], ids=["on a CPU", "as on a GPU"])
@pytest.mark.parametrize("name", MASKS)
def test_selected_elements_are_counted(name, pretended, monkeypatch):
    tensor, mask = torch.randn(2, 6, 8), MASKS[name]()
    if name == "no mask":
        tensor = tensor[0]
    if pretended:
        monkeypatch.setattr(counts, "asserts", lambda value: isinstance(value, torch.Tensor))
    found = counts.selected(tensor, mask)
    assert found == tensor[mask].numel()
    assert isinstance(found, torch.Tensor) == (pretended and name != "no mask")


def test_on_a_gpu_the_number_of_elements_stays_there(on_gpu, monkeypatch):
    monkeypatch.setattr(FakeTensor, "_veomni_hook_reads_it", None, raising=False)
    count_as_plain(FakeTensor)
    tensor = torch.empty(2, 6, 8, device="cuda")
    found = counts.selected(tensor, tensor > 0)
    assert found.is_cuda and found.shape == () and (found == 8).is_cuda


def test_what_cannot_be_indexed_is_upstreams_error():
    with pytest.raises(IndexError):
        counts.selected(torch.randn(2, 3), torch.ones(3, 3, dtype=torch.bool))
