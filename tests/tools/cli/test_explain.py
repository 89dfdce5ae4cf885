from __future__ import annotations

from pathlib import Path

import pytest

from veomni_hook.patches.reasons import Code

from .conftest import Command


def test_slots_of_the_installed_qwen3_and_their_kernels(veomni: Command) -> None:
    facts = veomni("explain", "qwen3", "--json", VEOMNI_KERNELS="rms_norm=eager").json
    kernels = {slot["op"]: slot["kernel"] for slot in facts["slots"]}
    assert kernels["rms_norm"] == "eager" and len(kernels) >= 4
    assert all(slot["decisions"] for slot in facts["slots"])


def test_fast_leaves_the_kernels_out(veomni: Command) -> None:
    facts = veomni("explain", "qwen3", "--json", "--fast").json
    assert facts["slots"] and all("kernel" not in slot for slot in facts["slots"])


def test_what_yields_to_a_users_config(veomni: Command, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from veomni_hook import PatchConfig\n"
        "config = PatchConfig('transformers.models.qwen3.modeling_qwen3')\n"
        "@config.override_method('Qwen3MLP.forward')\ndef forward(self, x):\n    return x\n"
    )
    facts = veomni("explain", "qwen3", "--json", "--fast", VEOMNI_PATCHES="mine").json
    (yielded,) = facts["yielded"]
    assert yielded["target"] == "Qwen3MLP.forward" and "mine" in yielded["reason"]
    verdicts = veomni("check", "qwen3", "--json", VEOMNI_PATCHES="mine").json
    assert sorted({v["verdict"] for v in verdicts}) == ["applies", "yields"]


def test_what_is_not_routed_is_told_once(veomni: Command) -> None:
    done = veomni("explain", "nllb_moe", "--fast")
    assert done.out.count("not routed") == done.out.count("NllbMoeExperts.forward") == 1
    cause = next(line.split()[3] for line in done.out.splitlines() if "NllbMoeExperts.forward" in line)
    assert done.out.count(Code[cause.upper()].remedy) == 1


def test_what_is_not_routed_is_told_where_nothing_else_applies(veomni: Command) -> None:
    facts = veomni("explain", "resnet", "--json", "--fast").json
    assert not facts["applied"] and {row["status"] for row in facts["missed"]} == {"missed"}
    assert veomni("explain", "resnet", "--json", "--fast", VEOMNI_IDIOMS="0").json["missed"] == []


@pytest.mark.slow
def test_slots_that_no_machine_has_a_kernel_for_are_apart(veomni: Command) -> None:
    facts = veomni("explain", "llama4", "--json", "--fast").json
    status = {slot["variant"]: slot["status"] for slot in facts["slots"] if slot["op"] == "moe_experts"}
    assert status == {"batched_gated": "no_kernel"}
    assert {slot["status"] for slot in facts["slots"] if slot["op"] != "moe_experts"} == {"routed"}
    text = veomni("explain", "llama4", "--fast").out
    listed = text.partition("slots without a kernel on any machine")[2]
    assert "batched_gated" in listed and "complex_pairs" not in listed
