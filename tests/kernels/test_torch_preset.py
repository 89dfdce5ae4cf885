"""The preset ``torch`` on whole models: it runs wherever PyTorch runs, and computes what upstream computes."""

import importlib

import pytest

from tests.kernels import patched_qwen3
from tests.kernels.matching import close, grads_of
from tests.kernels.patched_qwen3 import batch, load
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


def run(model, inputs):
    loss = model(**inputs, use_cache=False).loss
    loss.backward()
    return loss.detach(), grads_of(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_models_train_as_upstream(family, tmp_path_factory):
    config, kind, further, met = FAMILIES[family]
    name = f"transformers.models.{family}"
    home = importlib.import_module(f"{name}.modeling_{family}")
    patched = load(tmp_path_factory.mktemp(family), home.__name__)
    made = getattr(importlib.import_module(f"{name}.configuration_{family}"), config)(**SIZES | further)
    upstream, model = (getattr(each, kind)(made).train() for each in (home, patched))
    model.load_state_dict(upstream.state_dict())
    inputs = batch()
    set_choice("torch")
    loss, gradients = run(model, inputs)
    expected, upstream_gradients = run(upstream, inputs)
    close(loss, expected, 1e-5)
    close(gradients, upstream_gradients, 1e-4)
    taken = {
        f"{row.op}/{row.variant}" for row in explain(model).rows if row.called and row.backend == "torch"
    }
    assert met <= taken, taken
