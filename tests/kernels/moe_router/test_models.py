"""Routers in patched models: upstream's loss and gradients."""

import pytest

from tests.kernels import patched_qwen3
from tests.kernels.matching import DEVICE
from tests.kernels.patched_qwen3 import assert_equal_steps, batch, config_of, trained, twins
from veomni_hook.kernels.selection.process_choice import set_choice
from veomni_hook.tools.report.explanation import explain

pytest.importorskip("triton")

MOE = {**patched_qwen3.SIZES, "moe_intermediate_size": 16, "num_experts_per_tok": 3, "norm_topk_prob": True}
LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip
#: By model: configuration and model, sizes, and the variant that it routes by.
FAMILIES = {
    "qwen3_moe": (
        "Qwen3MoeConfig", "Qwen3MoeForCausalLM",
        {**MOE, "num_experts": 8, "output_router_logits": True}, "softmax_topk",
    ),
    "deepseek_v3": (
        "DeepseekV3Config", "DeepseekV3ForCausalLM",
        {**MOE, **LATENT, "n_routed_experts": 16, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1,
         "num_key_value_heads": 4},
        "grouped_topk",
    ),
}  # fmt: skip


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("family", FAMILIES)
def test_models_train_as_upstream(family, backend, anywhere, modules):
    config, kind, sizes, variant = FAMILIES[family]
    upstream, model = twins(*modules(family), kind, config_of(family, config, **sizes))
    for name, parameter in upstream.named_parameters():
        if name.endswith("gate.weight"):
            parameter.data.normal_()  # apart
    model.load_state_dict(upstream.state_dict())
    upstream, model = upstream.to(DEVICE), model.to(DEVICE)
    inputs = {name: each.to(DEVICE) for name, each in batch().items()}
    set_choice(f"eager, moe_router={backend}")
    found = trained(model, inputs)
    rows = [row for row in explain(model).rows if row.op == "moe_router" and row.called]
    assert rows and all(row.backend == backend and row.variant == variant for row in rows)
    assert_equal_steps(found, trained(upstream, inputs))
