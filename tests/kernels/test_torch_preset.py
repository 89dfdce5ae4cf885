"""The preset ``torch`` on whole models: it runs wherever PyTorch runs, and computes what upstream computes."""

import pytest

from tests.kernels import patched_qwen3
from tests.kernels.patched_qwen3 import assert_equal_steps, batch, config_of, trained, twins
from veomni_hook.kernels.selection.process_choice import set_choice
from veomni_hook.kernels.selection.registry import registry
from veomni_hook.tools.report.explanation import explain

SIZES = {**patched_qwen3.SIZES, "pad_token_id": 0}
HYBRID = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
}  # fmt: skip
#: By model: its configuration and model, what is special about the sizes, and variants that it has to meet.
FAMILIES = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}, {"add_rms_norm/cast_before_weight"}),
    "qwen3": (
        "Qwen3Config", "Qwen3ForCausalLM", {},
        {"qk_norm_rotary/cast_before_weight_half_split", "linear_cross_entropy/next_token"},
    ),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", {}, {"rms_norm/one_plus_weight"}),
    "glm4": ("Glm4Config", "Glm4ForCausalLM", {}, {"rotary/pairs_partial_repeated"}),
    "qwen3_next": (
        "Qwen3NextConfig", "Qwen3NextForCausalLM", HYBRID,
        {"rms_norm/cast_before_weight_gated", "rms_norm/one_plus_weight"},
    ),
}  # fmt: skip


def test_an_op_with_a_torch_kernel_has_one_for_every_variant():
    """Those that ops have none of, their `decisions.txt` show; of experts, their own tests."""
    for op in {*registry.preset("torch")} - {"moe_experts"}:
        found = {each.variant for each in registry.kernels(op) if each.backend == "torch"}
        assert found == {*registry.ops()[op].variants}, op


@pytest.mark.parametrize("family", FAMILIES)
def test_models_train_as_upstream(family, modules):
    config, kind, further, met = FAMILIES[family]
    home, patched = modules(family)
    upstream, model = twins(home, patched, kind, config_of(family, config, **SIZES | further))
    inputs = batch()
    set_choice("torch")
    assert_equal_steps(trained(model, inputs), trained(upstream, inputs))
    taken = {
        f"{row.op}/{row.variant}" for row in explain(model).rows if row.called and row.backend == "torch"
    }
    assert met <= taken, taken
