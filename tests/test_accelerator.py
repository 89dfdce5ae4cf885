"""What means an accelerator goes to ``torch.npu`` as to ``torch.cuda``, by a double of either."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from tests.processes import outputs, started
from veomni_hook import accelerator
from veomni_hook.kernels.problem import Problem
from veomni_hook.tools.bench import record, run, timing
from veomni_hook.tools.bench.cases import problems
from veomni_hook.tools.cli.bench import bench
from veomni_hook.tools.cli.sites import kernel


def doubled():
    """One device; notes what it is asked for."""
    asked = []

    def noted(word):
        return lambda: asked.append(word)

    def event(*, enable_timing):
        assert enable_timing
        return SimpleNamespace(
            record=noted("record"), synchronize=noted("wait"), elapsed_time=lambda end: 2.5
        )

    return SimpleNamespace(
        asked=asked, Event=event, is_available=lambda: True, get_device_name=lambda: "Ascend 910",
        synchronize=noted("synchronize"), reset_peak_memory_stats=noted("reset"), memory_allocated=lambda: 100,
        max_memory_allocated=lambda: 350,
    )  # fmt: skip


@pytest.fixture
def npu(monkeypatch):
    """A ``torch.npu``; the device type stays unknown to torch, which learns one for good."""
    double, generic = doubled(), torch.get_device_module
    monkeypatch.setattr(torch, "npu", double, raising=False)
    monkeypatch.setattr(torch, "get_device_module", lambda kind: double if kind == "npu" else generic(kind))
    accelerator.module.cache_clear()
    yield double
    accelerator.module.cache_clear()


@pytest.fixture
def short(monkeypatch):
    """Operands on the CPU, one round, and limits that need no measurement."""
    made = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, device, dtype: made(1, dtype=dtype))
    monkeypatch.setitem(run.ROUNDS, "npu", 1)
    monkeypatch.setattr(run, "bandwidth", lambda device: 1e9)


@pytest.mark.parametrize(
    ("there", "expected"),
    [((), "cpu"), (("cuda",), "cuda"), (("npu",), "npu"), (("cuda", "npu"), "npu")],
    ids=str,
)
def test_the_best_is_the_accelerator_that_is_there(there, expected, npu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: "cuda" in there)
    monkeypatch.setattr(npu, "is_available", lambda: "npu" in there)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert accelerator.best() == expected
    kernel.detected.cache_clear()
    assert kernel.detected().device == expected
    kernel.detected.cache_clear()


def test_the_best_without_torch_npu(monkeypatch):
    monkeypatch.delattr(torch, "npu", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert accelerator.best() == "cpu"


@pytest.mark.parametrize(
    ("build", "plugin", "expected"),
    [
        ("cuda = hip = None", False, "cpu"), ("cuda = '12.8'; hip = None", False, "cuda"),
        ("cuda = None; hip = '6.4'", False, "cuda"), ("cuda = hip = None", True, "cuda"), ("", False, "cuda"),
    ],
)  # fmt: skip
def test_only_a_torch_that_may_know_a_device_is_imported(build, plugin, expected, tmp_path, monkeypatch):
    """With a torch that says of a GPU that it is there, by the time it is imported."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "version.py").write_text(f"__version__ = '2.99.0'\n{build}\n")
    (tmp_path / "torch" / "__init__.py").write_text("class cuda:\n    is_available = lambda: True\n")
    if plugin:
        (tmp_path / "another_device-1.0.dist-info").mkdir()
        (tmp_path / "another_device-1.0.dist-info" / "entry_points.txt").write_text(
            "[torch.backends]\nanother = another_device:load\n"
        )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torch")
    accelerator._build.cache_clear()
    try:
        assert accelerator.torch_version() == "2.99.0"
        assert accelerator.best() == expected
        assert ("torch" in sys.modules) == (expected == "cuda")
    finally:
        accelerator._build.cache_clear()


def test_the_module_of_a_device(npu):
    assert accelerator.module("npu") is npu
    assert accelerator.module("cuda") is accelerator.module(torch.device("cuda", 1)) is torch.cuda
    assert accelerator.module("cpu") is accelerator.module(torch.device("meta")) is None


def test_times_are_those_of_events(npu, short):
    calls: list[int] = []
    assert timing.by_turns({"side": lambda: calls.append(1)}, "npu", 2) == {"side": [2.5] * 2}
    assert len(calls) == 3 + 2 * 2  # each timed call follows another
    assert npu.asked == ["record", "record", "wait"] * 2


def test_only_the_wall_waits_for_what_it_times(npu):
    for waited, waits in ((False, 1), (True, 2)):
        npu.asked.clear()
        assert timing.call_time(lambda: npu.asked.append("side"), "npu", 2, waited=waited) > 0
        assert npu.asked == ["side"] * 3 + ["synchronize"] + ["side"] * 2 + ["synchronize"] * waits


def test_a_peak_is_the_allocators(npu):
    assert timing.peak_bytes(lambda: npu.asked.append("side"), "npu") == 250
    assert npu.asked == ["synchronize", "reset", "side", "synchronize"]


def test_a_run_on_it(npu, short, monkeypatch):
    x = torch.randn(4, 4)
    problem = Problem(
        op="sum", shape="4 x 4", leaves=[x], sides={"eager": torch.exp}, limit="bytes",
        work={"forward": x.nbytes, "step": x.nbytes}, incoming={"backward": [torch.ones_like(x)]},
    )  # fmt: skip
    rows = {row.part: row for row in run.measured([problem], "npu")}
    assert list(rows) == ["forward", "step"]
    monkeypatch.setattr(run, "SHORT", 3.0)
    rows = {row.part: row for row in run.measured([problem], "npu")}
    assert list(rows) == ["forward", "step", "host", "wall"]
    assert rows["forward"].milliseconds == {"eager": 2.5}
    assert rows["step"].peak == {"eager": 250}
    assert record.circumstances("sum", "npu")["device"] == "Ascend 910"


def test_sizes_and_limits_are_an_accelerators(monkeypatch):
    monkeypatch.setattr(
        "veomni_hook.kernels.rms_norm.bench.made",
        lambda *shape, device: torch.empty(shape, device="meta"),
    )
    monkeypatch.setattr("veomni_hook.kernels.rms_norm.bench.sides_of", lambda *_, **__: {})
    assert [next(iter(problems("rms_norm", name))).shape for name in ("npu", "cuda", "cpu")] == [
        "131072 x 4096",
        "131072 x 4096",
        "2048 x 1024",
    ]
    sizes = []
    monkeypatch.setattr(torch, "randn", lambda *shape, device: torch.empty(shape, device="meta"))
    for name in ("npu", "cuda", "cpu"):
        sizes.append(timing.product.__wrapped__(name, torch.float32)[1])
    assert sizes[0] == sizes[1] == 64 * sizes[2]


def test_a_benchmark_is_on_the_best(monkeypatch):
    taken = []
    monkeypatch.setattr(accelerator, "best", lambda: "npu")
    monkeypatch.setattr(run, "measured", lambda problems, device: taken.append(device) or ())
    monkeypatch.setattr(record, "described", lambda *facts: {})
    bench(["rms_norm"], as_json=True)
    assert taken == ["npu"]


LAUNCHES = """
from contextlib import contextmanager
import torch

torch.utils.rename_privateuse1_backend("npu")

class Module:
    current = 0
    current_device = classmethod(lambda cls: cls.current)

    @classmethod
    @contextmanager
    def device(cls, index):
        cls.current, before = index, cls.current
        yield
        cls.current = before

class On(torch.Tensor):
    def __new__(cls, device):
        return torch.Tensor._make_wrapper_subclass(cls, (2,), device=device)

    def __torch_dispatch__(self, *call):
        raise NotImplementedError

torch._register_device_module("npu", Module)
torch.cuda.current_device, torch.cuda.device = Module.current_device, Module.device
torch._C._cuda_getDevice = Module.current_device  # what builds for GPUs have

from veomni_hook.kernels.shared.operators import operator

seen = []
note = operator(lambda x: None, "test_noted(Tensor x) -> ()")(lambda x: seen.append(Module.current))
for device in ("npu:0", "npu:1", "npu:0", "cuda:1", "cuda:0", "cpu", "meta"):
    note(On(device))
print(seen, Module.current)
"""


def test_a_launch_is_on_the_device_of_its_operand():
    """With tensors without data on devices that are not there, in a process where ``npu`` is a device type."""
    assert outputs(started("-c", LAUNCHES))[0].strip() == "[0, 1, 0, 1, 0, 0, 0] 0"


def test_importing_it_loads_no_torch():
    code = "import sys, veomni_hook.accelerator, veomni_hook.tools.cli.demo.worker; print('torch' in sys.modules)"
    assert outputs(started("-c", code))[0].strip() == "False"
