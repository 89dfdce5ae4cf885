from __future__ import annotations

import pytest
import torch

from veomni_hook.errors import KernelError
from veomni_hook.kernels.selection.system import System


def test_detect_reads_this_machine():
    system = System.detect("cpu")
    assert (system.device, system.capability) == ("cpu", None)
    assert system.torch == torch.__version__


def test_a_system_is_printed_in_words():
    assert str(System("cuda", (9, 0), "2.13", "3.5")) == "cuda, SM90, torch 2.13, triton 3.5"
    assert str(System("cpu")) == "cpu, torch unknown, no triton"


@pytest.mark.parametrize(
    ("name", "device", "capability"),
    [
        ("cpu", "cpu", None),
        ("sm80", "cuda", (8, 0)),
        ("SM90", "cuda", (9, 0)),
        ("sm100", "cuda", (10, 0)),
        ("ascend", "npu", None),
    ],
)
def test_systems_have_names(name, device, capability):
    system = System.named(name)
    assert (system.device, system.capability) == (device, capability)
    assert (system.triton is None) is (device == "npu")
    assert system.lacks("whatever>=3") is None and "assumed" in str(system)


def test_other_names_are_errors_that_list_them():
    with pytest.raises(KernelError, match="sm9") as caught:
        System.named("sm9")
    assert caught.value.fix == "cpu, sm80, sm90, sm100 or ascend"


def test_detect_looks_for_distributions():
    system = System.detect("cpu", ["pytest", "no_such_distribution"])
    assert system.lacks("pytest") is None and "not installed" in system.lacks("no_such_distribution")
    assert str(system).endswith(f"pytest {pytest.__version__}")


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        ("2.7.1.post11", None),
        ("2.13.0", None),
        ("2.14.0rc1", None),
        ("2.6.0.post5", "needs torch_npu>=2.7.1, found 2.6.0.post5"),
    ],
)
def test_versions_of_distributions(version, reason):
    assert System("npu", distributions={"torch_npu": version}).lacks("torch_npu>=2.7.1") == reason
