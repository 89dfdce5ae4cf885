from __future__ import annotations

import json

import pytest

from veomni_hook.cli import kernels
from veomni_hook.errors import KernelError
from veomni_hook.kernels.registry import registry
from veomni_hook.kernels.system import System

from .conftest import Command

CPU = System("cpu", torch="2.13.0")


def test_every_kernel_is_listed_with_a_reason(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernels, "detected", lambda device: CPU)
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
    monkeypatch.setattr(kernels, "detected", lambda device: CPU)
    monkeypatch.setenv("VEOMNI_KERNELS", "rms_norm=eager")
    assert kernels.chosen_for("rms_norm", "cast_before_weight")["kernel"] == "eager"
    assert kernels.chosen_for("rotary", "half_split")["kernel"] == "torch"


def test_a_choice_that_cannot_run_is_wrong_use(tiny: Command) -> None:
    done = tiny("kernels", "--device", "cpu", VEOMNI_KERNELS="rms_norm=tritn")
    assert (done.status, done.out) == (2, "")
    assert "tritn" in done.err and "torch" in done.err
    with pytest.raises(KernelError):
        kernels.selection("rms_norm", "no_such_variant", "auto", CPU)
