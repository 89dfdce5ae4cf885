"""Loaded models adopt patched classes: same results, same state, kernels in them, and nothing else changes."""

import re
from pathlib import Path

import pytest
import transformers
from packaging.version import Version

from tests import processes
from tests.importing import POSITIONS_ARE_COUNTED

NORM, LOSS = "rms_norm/cast_before_weight", "linear_cross_entropy/next_token"
EVERYWHERE = {NORM, LOSS, "add_rms_norm/cast_before_weight", "gated_mlp/product", "rotary/half_split"}
# Older releases sum the probabilities in the dtype of the router.
BALANCING = (
    "softmax_topk" if Version(transformers.__version__) >= Version("5.17") else "softmax_topk_in_dtype"
)
OPS = {
    "llama": EVERYWHERE,
    "qwen3": EVERYWHERE | {"qk_norm_rotary/cast_before_weight_half_split"},
    "qwen3_moe": EVERYWHERE - {"gated_mlp/product"}
    | {
        "qk_norm_rotary/cast_before_weight_half_split",
        "moe_experts/gated",
        "moe_router/softmax_topk",
        f"load_balancing_loss/{BALANCING}",
    },
    "gemma3_text": {
        LOSS, "rms_norm/one_plus_weight", "add_rms_norm/one_plus_weight", "rotary/half_split",
        "qk_norm_rotary/one_plus_weight_half_split",
    },
    "nemotron": {LOSS, "activation/relu_squared", "rotary/half_split_partial"},
}  # fmt: skip
CLOSE = 5e-6


def facts_of(script, cache):
    """What a script of facts says in a process of its own, with kernels in PyTorch."""
    return processes.facts(
        processes.started(Path(__file__).with_name(script), cache=cache, VEOMNI_KERNELS="torch")
    )


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    return facts_of("facts_of_adoption.py", tmp_path_factory.mktemp("adopted") / "cache")


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", OPS)
def test_an_adopted_model_computes_the_same_on_kernels(facts, family):
    fact = facts[family]
    assert fact["difference"] < CLOSE
    assert set(fact["ran"]) == OPS[family]
    assert set(fact["ran"].values()) == {"torch"}
    assert fact["same parameters"] and fact["same keys"]
    assert fact["same classes by name"] and fact["isinstance"]


def test_the_report_says_what_was_adopted(facts):
    assert facts["qwen3"]["text"].splitlines() == [
        f"Qwen3ForCausalLM: {16 + POSITIONS_ARE_COUNTED} modules of {5 + POSITIONS_ARE_COUNTED} classes adopted",
        f"  Qwen3ForCausalLM x 1: {LOSS}",
        *["  Qwen3Model x 1: patched"] * POSITIONS_ARE_COUNTED,
        "  Qwen3DecoderLayer x 2: add_rms_norm/cast_before_weight",
        "  Qwen3Attention x 2: qk_norm_rotary/cast_before_weight_half_split, rotary/half_split",
        f"  Qwen3RMSNorm x 9: {NORM}",
        "  Qwen3MLP x 2: gated_mlp/product",
    ]
    assert facts["qwen3"]["report"]["refused"] == []
    again = facts["again"]
    assert again["adopted"] == []
    assert {each["reason"] for each in again["before"]} == {"adopted before"}


def test_other_models_and_the_module_stay_as_they_were(facts):
    assert facts["other"] == {"class": True, "module": True, "rows": 0, "difference": 0.0}


def test_hooks_fire_and_keep_fused_kernels_away(facts):
    assert facts["hooked"]["seen"] == ["norm"]
    assert facts["hooked"]["difference"] < CLOSE
    assert "the norm has hooks, which a fused kernel would skip" in facts["hooked"]["reasons"]


def test_copies_are_adopted_and_pickles_are_upstreams(facts):
    copies = facts["copies"]
    assert copies["deepcopy"] and copies["tied"] and copies["shallow"]
    assert copies["deepcopy ran"] < CLOSE
    assert set(copies["deepcopy kernels"]) == OPS["qwen3"]
    assert copies["pickled"] == 0.0 and copies["torch.save"]
    assert copies["loaded"] == 0.0 and copies["loaded"] is not False
    assert not copies["imported"]


def test_generation_hidden_states_and_bindings_work(facts):
    assert facts["generated"]
    assert facts["hidden states"] == 3
    assert facts["bound"]


def test_subclasses_and_wrapped_models_are_adopted(facts):
    assert facts["mine"]["difference"] < CLOSE
    assert facts["mine"]["calls"] == 1 and facts["mine"]["isinstance"]
    assert set(facts["mine"]["ran"]) == OPS["qwen3"]
    assert set(facts["wrapped"]) == OPS["qwen3"]


def test_what_others_changed_is_left_with_a_reason(facts):
    (mlp, norm), replaced = facts["odd"]["refused"], facts["replaced"]
    assert mlp[:2] == ["Qwen3MLP", "model.layers.0.mlp"] and "has its own forward" in mlp[2]
    assert norm[0] == "ParametrizedQwen3RMSNorm" and "torch.nn.utils.parametrize" in norm[2]
    assert facts["odd"]["adopted"] == 14 + POSITIONS_ARE_COUNTED and facts["odd"]["difference"] < CLOSE
    assert replaced["refused"] == {"Qwen3Attention": "Qwen3Attention.forward was replaced by __main__.others"}
    assert "Qwen3Attention" not in replaced["adopted"] and replaced["difference"] < CLOSE


def test_an_edited_source_of_an_adopted_method_runs(facts):
    assert facts["edited"]["difference"] > 1e-3
    reasons = facts["edited"]["reasons"]
    assert reasons and all("the function that asks is an edited copy" in reason for reason in reasons)


def test_of_users_patches_those_of_methods_are_taken_over(facts):
    config = facts["config"]
    assert config["calls"] == 1 and config["function"]
    # `super()` in a patched method is what stands above upstream's class, not upstream's method.
    assert config["above"] == "_forward_unimplemented"
    assert config["difference"] < CLOSE
    assert config["refused"] == {"Qwen2RMSNorm": "a patch changes its __init__, which has run already"}
    assert (
        "rotate_half of transformers.models.qwen2.modeling_qwen2: all models of the module" in config["text"]
    )


def test_a_model_that_was_patched_on_import_has_nothing_to_adopt(facts):
    assert facts["imported patched"] == [False, ["patched when its module was imported"]]


def test_errors_say_what_to_do(facts):
    assert facts["switched off"] == "Qwen3ForCausalLM: not patched, the hook is off (VEOMNI_HOOK=0)"
    assert "while the hook is off" in facts["off"] and "veomni_hook.install" in facts["off"]
    assert "no class in it is from a modeling file" in facts["nothing"]
    assert "a str has no modules" in facts["no module"]
    (late,) = facts["late"]
    assert re.match(
        r"imported too early to be patched: \w+, \w+, \w+ and \d+ more\. They stay unpatched\. "
        r"transformers imported too early\. Models lose: .+\. `handle\.status\(\)` lists all modules\. Fix: ",
        late,
    ), late
    assert "modeling_" not in late


def test_the_status_says_which_modules_have_adopted_models(facts):
    reason = "not patched: imported before the hook was active"
    adopted = f"{reason}; veomni_hook.adopt has patched models of it"
    assert facts["status"]["transformers.models.qwen3.modeling_qwen3"] == adopted
    assert facts["status"]["transformers.models.auto.modeling_auto"] == reason


def test_undo_gives_the_classes_back_and_deactivation_does_not(facts):
    assert facts["deactivated"] == {"difference": 0.0, "ran": {}}
    assert facts["undone"] == {"class": True, "rows": 0, "same": 0.0}
    assert facts["adopted anew"]
    assert "model.norm is a __main__.Sharded now" in facts["not undone"]
    assert facts["others undone"]
