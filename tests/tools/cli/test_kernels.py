from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from veomni_hook.kernels.selection.choice import Choice
from veomni_hook.kernels.selection.registry import registry
from veomni_hook.kernels.selection.system import System
from veomni_hook.tools.cli.app import app
from veomni_hook.tools.cli.sites import kernel

CPU = System("cpu", torch="2.13.0")


def explained(*arguments: str) -> Any:
    """The JSON document of `veomni-hook explain`."""
    done = CliRunner().invoke(app, ["explain", *arguments, "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_every_kernel_is_listed_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "detected", lambda: CPU)
    report = explained()
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


def test_an_op_without_a_kernel_there_says_why_and_what_asks_instead() -> None:
    answer = kernel.asked("qk_norm_rotary", "cast_before_weight_half_split", Choice(), CPU)
    assert answer.backend == "eager"
    assert answer.reason.startswith("no kernel can run here: triton needs a device of type cuda, found cpu")
    assert answer.reason.endswith("; rms_norm and rotary ask for kernels separately")


def test_a_backend_by_name_that_cannot_run_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VEOMNI_KERNELS", "triton")
    answer = kernel.asked("rms_norm", "cast_before_weight", kernel.chosen(), kernel.machine("ascend"))
    assert answer.backend == "none"
    assert answer.reason.endswith("cannot use 'triton': needs a device of type cuda, found npu")


def test_another_system_needs_no_such_machine() -> None:
    report = explained("--system", "sm90")
    assert report["system"] == "cuda, SM90, all packages assumed"
    chosen = {(row["op"], row["variant"]): row["backend"] for row in report["kernels"] if row["chosen"]}
    assert chosen["rms_norm", "cast_before_weight"] == "triton"
    assert report["presets"]["triton"][0] == "activation"


def test_a_preset_shows_where_a_call_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VEOMNI_KERNELS", "rms_norm=triton")
    rows = explained("rms_norm", "--system", "cpu")["kernels"]
    rows = [row for row in rows if row["variant"] == "cast_before_weight"]
    assert not any(row["chosen"] for row in rows)
    reasons = {row["backend"]: row["reason"] for row in rows}
    assert reasons["eager"].startswith(
        "a call raises an error: rms_norm/cast_before_weight cannot use 'triton'"
    )
    assert reasons["triton"] == "needs a device of type cuda, found cpu"


def test_one_op() -> None:
    report = explained("rotary", "--system", "cpu")
    assert {row["op"] for row in report["kernels"]} == {"rotary"} and report["presets"] == {}


def test_the_places_of_a_family_get_kernels_of_another_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VEOMNI_KERNELS", raising=False)
    found = {
        system: {slot["op"]: slot["kernel"] for slot in explained("qwen3", "--system", system)["slots"]}
        for system in ("ascend", "sm90")
    }
    assert found["ascend"].keys() == found["sm90"].keys() >= {"rms_norm", "gated_mlp", "linear_cross_entropy"}
    assert (found["ascend"]["rms_norm"], found["sm90"]["rms_norm"]) == ("npu", "triton")
