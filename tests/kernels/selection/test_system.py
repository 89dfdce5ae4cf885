from pathlib import Path

import pytest
import torch

from veomni_hook import accelerator
from veomni_hook.errors import KernelError
from veomni_hook.kernels.selection.choice import parse_choice
from veomni_hook.kernels.selection.select import select, system_of
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
        ("rocm", "cuda", None),
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
    assert caught.value.fix == "cpu, sm80, sm90, sm100, rocm or ascend"


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


@pytest.mark.parametrize("hip", ["6.4", None])
def test_amds_gpus_are_another_system(hip, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 4))
    system = system_of("cuda")
    assert (system.rocm, system.capability) == ((True, None) if hip else (False, (9, 4)))
    assert str(system).startswith("cuda, ROCm, " if hip else "cuda, SM94, ")
    assert not System.detect("cpu").rocm
    choice = parse_choice("varlen_attention=flash")
    reasons = {
        one.backend: one.reason for one in select("varlen_attention", "full", choice, system).decisions
    }
    assert reasons["flash"] == (
        "needs an NVIDIA GPU, found ROCm, where it was not checked" if hip else "chosen"
    )


def test_one_place_asks_whether_torch_is_built_for_amd():
    package = Path(accelerator.__file__).parent
    asking = [
        path.name for path in package.rglob("*.py") if "version.hip" in path.read_text(encoding="utf-8")
    ]
    assert asking == ["accelerator.py"]
