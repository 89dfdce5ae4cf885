from __future__ import annotations

import json

import pytest

from veomni_hook.cli.kernels import command as kernels
from veomni_hook.cli.sites import kernel
from veomni_hook.cli.usage import UsageError
from veomni_hook.errors import KernelError
from veomni_hook.kernels.selection.choice import Choice
from veomni_hook.kernels.selection.registry import registry
from veomni_hook.kernels.selection.system import System

from ..conftest import Command

CPU = System("cpu", torch="2.13.0")


def test_every_kernel_is_listed_with_a_reason(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernel, "detected", lambda device: CPU)
    kernels.kernels(as_json=True)
    report = json.loads(capfd.readouterr().out)
    rows = report["kernels"]
    assert report["system"] == str(CPU)
    listed = {(row["op"], row["variant"], row["backend"]) for row in rows}
    declared = {(kernel.op, kernel.variant, kernel.backend) for kernel in registry.kernels()}
    assert declared < listed
    assert {backend for _, _, backend in listed - declared} == {"eager"}
    assert all(row["reason"] and row["description"] for row in rows)
    chosen = [(row["op"], row["variant"]) for row in rows if row["chosen"]]
    assert len(chosen) == len(set(chosen)) == len({(row["op"], row["variant"]) for row in rows})


def test_the_choice_of_the_settings_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VEOMNI_KERNELS", "rms_norm=eager")
    choice = kernel.chosen()
    assert kernel.asked("rms_norm", "cast_before_weight", choice, CPU).backend == "eager"
    assert kernel.asked("rotary", "half_split", choice, CPU).backend == "torch"


def test_a_choice_that_cannot_run_is_wrong_use(tiny: Command) -> None:
    done = tiny("kernels", "--device", "cpu", VEOMNI_KERNELS="rms_norm=tritn")
    assert (done.status, done.out) == (2, "")
    assert "tritn" in done.err and "torch" in done.err
    with pytest.raises(KernelError):
        kernel.asked("rms_norm", "no_such_variant", Choice(), CPU)


def test_another_system_needs_no_such_machine(capfd: pytest.CaptureFixture[str]) -> None:
    kernels.kernels(system="sm90", as_json=True)
    report = json.loads(capfd.readouterr().out)
    assert report["system"] == "cuda, SM90, all packages assumed"
    chosen = {(row["op"], row["variant"]): row["backend"] for row in report["kernels"] if row["chosen"]}
    assert chosen["rms_norm", "cast_before_weight"] == "triton"
    assert report["presets"]["triton"][0] == "rms_norm"


def test_a_preset_shows_where_a_call_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VEOMNI_KERNELS", "rms_norm=triton")
    kernels.kernels(system="cpu", as_json=True)
    rows = json.loads(capfd.readouterr().out)["kernels"]
    rows = [row for row in rows if (row["op"], row["variant"]) == ("rms_norm", "cast_before_weight")]
    assert not any(row["chosen"] for row in rows)
    reasons = {row["backend"]: row["reason"] for row in rows}
    assert reasons["eager"].startswith(
        "a call raises an error: rms_norm/cast_before_weight cannot use 'triton'"
    )
    assert reasons["triton"] == "needs a device of type cuda, found cpu"


@pytest.mark.parametrize(
    ("options", "said"),
    [(("--system", "sm9"), "sm100"), (("--system", "cpu", "--device", "cpu"), "one of the two")],
)
def test_a_system_that_does_not_exist_is_wrong_use(
    tiny: Command, options: tuple[str, ...], said: str
) -> None:
    done = tiny("kernels", *options)
    assert (done.status, done.out) == (2, "")
    assert said in done.err


def test_ops_may_be_named(capfd: pytest.CaptureFixture[str]) -> None:
    kernels.kernels(["rotary", "rms_norm"], system="cpu", as_json=True)
    report = json.loads(capfd.readouterr().out)
    assert {row["op"] for row in report["kernels"]} == {"rotary", "rms_norm"} and report["presets"] == {}


@pytest.mark.parametrize(
    ("names", "fix"),
    [(["rms_nrm"], "nearest ops: rms_norm"), (["rms_norm", "tiny"], "name ops only, or families only")],
)
def test_a_name_that_is_nearly_an_ops(names: list[str], fix: str) -> None:
    with pytest.raises(UsageError) as caught:
        kernels.kernels(names, system="cpu")
    assert caught.value.fix == fix
