"""Mixtures of experts with the torch backend beside upstream's loop: loss, logits, gradients, checkpoints."""

import sys
from pathlib import Path

import pytest

from tests.integration import facts_of_experts
from tests.processes import facts as facts_of
from tests.processes import started

SCRIPT = Path(__file__).with_name("facts_of_experts.py")
#: In every supported release.
FAMILIES = {
    "qwen3_moe", "qwen2_moe", "olmoe", "mixtral", "gpt_oss", "deepseek_v3", "glm4_moe", "qwen3_vl_moe",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What unpatched transformers saved and computed."""
    assert "veomni_hook.install" not in sys.modules
    made = tmp_path_factory.mktemp("experts")
    assert set(facts_of_experts.plain(made)) >= FAMILIES
    return made


@pytest.fixture(scope="module")
def facts(folder):
    # Everything else as upstream computes it.
    kernels = "eager,moe_experts=torch,moe_router=torch,load_balancing_loss=torch"
    found = facts_of(started(SCRIPT, folder, cache=folder / "cache", VEOMNI_KERNELS=kernels))
    assert len(found) >= len(FAMILIES)
    return found


def test_loss_logits_and_all_gradients_are_upstreams(facts):
    for family, found in facts.items():
        assert found["gradients"], family
        assert found["of experts"] >= 2 * found["modules"] > 0, family
        assert found["worst"][1] < 1e-5, (family, found["worst"])


def test_the_kernel_computed_them(facts):
    variants = {"gpt_oss": "biased_interleaved_alpha_gated", "deepseek_v4": "gated_clamped"}
    for family, found in facts.items():
        assert found["backends"] == [f"{variants.get(family, 'gated')} torch chosen"], family
        assert found["routers"] == ["torch chosen"], family


def test_checkpoints_of_unpatched_transformers_load_and_are_saved_exactly(facts):
    for family, found in facts.items():
        assert found["loading"] == {}, family
        assert found["files"] > 1, family
        assert found["saved back"], family


def test_what_a_patched_model_saves_loads_into_unpatched_transformers(facts, folder):
    again = facts_of_experts.all_again(folder)
    assert again.keys() == facts.keys()
    assert all(again.values()), again
