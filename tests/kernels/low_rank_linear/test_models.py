"""Adapters of a whole model under the hook: PEFT's own, in wrappers, on two ranks, saved and loaded."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("peft")

from tests.processes import facts as facts_of
from tests.processes import started, two_ranks

SCRIPT = Path(__file__).with_name("facts_of_models.py")
CLOSE = {"difference": pytest.approx(0, abs=2e-6), "gradients": 28, "ran": ["torch: chosen"]}
ROUNDED = {**CLOSE, "difference": pytest.approx(0, abs=3e-2)}


def told(cache, *arguments):
    return facts_of(started(SCRIPT, *arguments, cache=cache))


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def facts(cache):
    return told(cache)


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", ["plain", "dropout", "checkpointing"])
def test_a_model_trains_as_with_peft_alone(facts, case):
    assert facts[case] == CLOSE


def test_float32_adapters_of_a_bfloat16_model(facts):
    assert facts["bfloat16"] == ROUNDED


OF_BOTH = {"add_rms_norm", "linear_cross_entropy", "low_rank_linear", "qk_norm_rotary", "rms_norm"}


@pytest.mark.parametrize(
    ("family", "own"),
    [("qwen3", {"gated_mlp"}), ("qwen3_moe", {"load_balancing_loss", "moe_experts", "moe_router"})],
)
def test_nothing_is_made_of_the_shape_of_a_frozen_weight(facts, family, own):
    """No gradient of an embedding, a norm, a router, a head, a layer or experts, in any kernel."""
    found = facts["frozen"][family]
    assert found["made"] == []
    assert set(found["ran"]) >= OF_BOTH | own


def test_the_gradient_of_a_trained_weight_is_seen(facts):
    assert facts["trained"]["made"] == ["mm [48, 32]", "sum [8]"]


def test_explain_says_what_becomes_of_an_adapter(facts):
    alone = "the layer alone runs"
    weights = ("down_proj", "gate_up_proj")
    fused = f"adapter fused ({', '.join(weights)})"
    assert facts["notes"] == {
        "qwen3": ["adapter fused"],
        "qwen3 merged": [f"adapter merged into the weight by PEFT: {alone}"],
        "qwen3 disabled": [f"adapter disabled: {alone}"],
        "qwen3 enabled": ["adapter fused"],
        "qwen3 unloaded": [],
        "qwen3_moe": [fused],
        "qwen3_moe merged": [
            "; ".join(f"adapter of {name} merged into the weight by PEFT" for name in weights)
        ],
        "qwen3_moe disabled": ["; ".join(f"adapter of {name} disabled" for name in weights)],
        "qwen3_moe enabled": [fused],
        "qwen3_moe unloaded": [""],
    }


def test_what_is_left_to_peft_is_said(facts):
    reason = "eager: the adapter is a variant, DoraLinearVariant"
    assert facts["variant"] == {"difference": 0.0, "gradients": 42, "ran": [reason]}


def test_saved_adapters_are_pefts(facts):
    """Names do not change, and a model without our patches in its layers takes them."""
    assert {"adapter_config.json", "adapter_model.safetensors"} <= set(facts["saved"])
    assert facts["loaded"] and facts["merged"] < 1e-4
    layer = "base_model.model.model.layers.0.self_attn.q_proj"
    of_layer = [name.removeprefix(layer) for name in facts["keys"] if name.startswith(layer)]
    assert of_layer == [".base_layer.weight", ".lora_A.default.weight", ".lora_B.default.weight"]


@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
@pytest.mark.parametrize("kind", ["4bit", "8bit"])
def test_quantised_layers_run_themselves_and_the_term_is_added(cache, kind):
    facts = told(cache, kind)
    assert facts["plain"] == {**ROUNDED, "difference": pytest.approx(0, abs=6e-2)}
    assert facts["prepared"] == {**ROUNDED, "difference": pytest.approx(0, abs=6e-2)}


@pytest.mark.slow
def test_a_model_of_modules_imported_before_the_hook_is_adopted(cache):
    facts = told(cache, "late")
    assert "Linear" in facts.pop("names") and facts.pop("isinstance")
    assert facts == CLOSE


@pytest.mark.slow
def test_two_ranks(cache):
    """DDP and FSDP2; where FSDP2 takes a part of a layer for itself, its hooks run."""
    for output in two_ranks(SCRIPT, cache, {"VEOMNI_CACHE_DIR": str(cache)}):
        found = json.loads(output.splitlines()[-1])
        assert all(found[case] == CLOSE for case in ("ddp", "fsdp2", "fsdp2 of base_layer"))
        assert found["fsdp2 bfloat16"] == ROUNDED
        hooks = {"difference": 0.0, "gradients": 28, "ran": ["eager: a part of the adapter has hooks"]}
        assert found["fsdp2 of lora_A"] == hooks
