"""Whole models of VeOmni, built by its own builder with our kernels by name, against its eager code."""

import sys

import pytest
import torch

pytest.importorskip("veomni")

from transformers import DeepseekV3Config, Qwen3MoeConfig
from veomni.arguments.arguments_types import OpsImplementationConfig
from veomni.models.auto import _bind_veomni_ops, build_foundation_model
from veomni.ops import apply_ops_config

from tests.integrations.veomni_cases import far, places
from veomni_hook.integrations.veomni import register

SMALL = {
    "vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 24,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
FIELDS = sorted({each.field for each in register().kernels})
# No kernel of ours: the eager code of qwen3_5.
OTHERS = {"causal_conv1d_implementation": "eager", "chunk_gated_delta_rule_implementation": "eager"}


def chosen(name, **others):
    return OpsImplementationConfig(
        attn_implementation="eager", **OTHERS, **{**dict.fromkeys(FIELDS, name), **others}
    )


def built(config, ops, device, dtype="float32"):
    model = build_foundation_model(config, torch_dtype=dtype, init_device=device, ops_implementation=ops)
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.1)
    return model.train()


def step(model, device, **options):
    """Return what a training step computes: loss or log-probabilities, and every gradient."""
    torch.manual_seed(1)
    ids = torch.randint(0, 99, (2, 11)).to(device)
    mask = torch.ones_like(ids)
    mask[0, 8:] = 0
    model.zero_grad(set_to_none=True)
    out = model(
        input_ids=ids, attention_mask=mask, labels=ids.where(mask == 1, -100), use_cache=False, **options
    )
    outputs = [out.loss] if out.loss is not None else [out.log_probs, out.entropy]
    sum(each.sum() for each in outputs).backward()
    aux = getattr(out, "aux_loss", None)
    found = [*outputs, *([] if aux is None else [aux])]
    return [each.detach() for each in found] + [
        each.grad for each in model.parameters() if each.grad is not None
    ]


@places
def test_qwen3_moe_bound_by_name_trains_like_the_eager_code(name, device):
    config = Qwen3MoeConfig(
        **SMALL, head_dim=16, num_experts=4, num_experts_per_tok=2, output_router_logits=True, mlp_only_layers=[0],
        architectures=["Qwen3MoeForCausalLM"],
    )  # fmt: skip
    model = built(config, chosen(name), device)
    home = sys.modules[type(model).__module__]
    assert home.__name__.endswith("generated.patched_modeling_qwen3_moe_gpu")
    slots = [each for each in vars(home).values() if type(each).__name__ == "OpSlot"]
    assert len(slots) == 6 and all(each.use_non_eager_impl for each in slots)
    calls = ({"output_router_logits": True}, {"return_log_probs": True, "output_router_logits": False})
    ours = [step(model, device, **call) for call in calls]
    apply_ops_config(chosen("eager"))
    _bind_veomni_ops(home, chosen("eager"))
    assert not any(each.use_non_eager_impl for each in slots)
    eager = [step(model, device, **call) for call in calls]
    for found, expected in zip(ours, eager, strict=True):
        assert far(found, expected) < 1e-4
    assert len(ours[0]) == len(list(model.parameters())) + 2


@places
def test_deepseek_v3_gets_the_norm_from_the_older_registry_and_experts_by_the_pointer(
    name, device, monkeypatch
):
    from veomni.models.transformers.deepseek_v3.generated import patched_modeling_deepseek_v3_gpu as home

    monkeypatch.setattr(home.DeepseekV3RMSNorm, "forward", home.DeepseekV3RMSNorm.forward)
    config = DeepseekV3Config(
        **{**SMALL, "num_key_value_heads": 4}, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1,
        first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8,
        v_head_dim=8, architectures=["DeepseekV3ForCausalLM"],
    )  # fmt: skip
    eager = step(built(config, chosen("eager"), device, "bfloat16"), device)
    # VeOmni's older registry has no rotary embedding of ours: see docs/veomni.md.
    ops = chosen(name, rotary_pos_emb_implementation="eager")
    model = built(config, ops, device, "bfloat16")
    assert home.DeepseekV3RMSNorm.forward.__module__.startswith("veomni_hook")
    ours = step(model, device)
    assert far(ours[:1], eager[:1]) < 1e-2
    cosines = [
        torch.nn.functional.cosine_similarity(one.flatten().float(), other.flatten().float(), dim=0).item()
        for one, other in zip(ours[1:], eager[1:], strict=True)
    ]
    assert min(cosines) > 0.99
    with pytest.raises(ValueError, match="rotary_pos_emb_implementation='veomni_hook_"):
        built(config, chosen(name), device, "bfloat16")
    apply_ops_config(chosen("eager"))
