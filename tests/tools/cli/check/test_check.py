from __future__ import annotations

from ..conftest import Command


def test_every_spec_applies_to_the_installed_transformers(veomni: Command) -> None:
    done = veomni("check", "--json")
    assert done.status == 0, done.out + done.err
    assert {verdict["verdict"] for verdict in done.json} <= {"applies"}


def test_a_family_of_the_installed_transformers_has_its_routes(veomni: Command) -> None:
    done = veomni("check", "qwen3", "--json")
    assert done.status == 0, done.out + done.err
    applies = {(v["target"], v["detail"].partition(",")[0]) for v in done.json if v["verdict"] == "applies"}
    assert {
        ("Qwen3RMSNorm.forward", "rms_norm/cast_before_weight"),
        ("Qwen3Attention.forward", "rotary/half_split"),
        ("Qwen3ForCausalLM.forward", "linear_cross_entropy/next_token"),
    } <= applies
    said = {detail.partition("/")[0] for target, detail in applies if target == "Qwen3Attention.forward"}
    assert said == {"rotary", "qk_norm_rotary"}
    assert any(target == "Qwen3MLP.forward" and detail.startswith("gated_mlp/") for target, detail in applies)
    assert {v["config"] for v in done.json} == {"veomni_hook.patches.idioms"}
