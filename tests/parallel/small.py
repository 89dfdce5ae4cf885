"""Small models of several families, and batches for them."""

from __future__ import annotations

from typing import Any

import torch
import transformers

VOCABULARY = 48
_SHARED: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LINEAR: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 4,
    "linear_conv_kernel_dim": 4,
}
#: A decay for each channel.
_CHANNELS: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_heads": 4,
    "linear_head_dim": 6,
    "linear_conv_kernel_dim": 4,
    "num_key_value_heads": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "kv_lora_rank": 8,
    "q_lora_rank": None,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "n_group": 1,
    "topk_group": 1,
    "mlp_layer_types": ["dense", "sparse", "dense"],
}
_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 8}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {"head_dim": 8, **_EXPERTS, "decoder_sparse_step": 1, "mlp_only_layers": []},
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "head_dim": 8,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 8,
        },
    ),
    "gpt_oss": (
        "GptOssConfig",
        {
            "head_dim": 8,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 6,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "n_shared_experts": 1,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
    ),
    "gemma2": (
        "Gemma2Config",
        {
            "head_dim": 8,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 8,
            "attn_logit_softcapping": 0.5,
            "final_logit_softcapping": 1.0,
        },
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        {"head_dim": 8, **_EXPERTS, **_LINEAR, "shared_expert_intermediate_size": 8},
    ),
    "qwen3_5": ("Qwen3_5TextConfig", {"head_dim": 8, **_LINEAR}),
    "qwen3_5_moe": (
        "Qwen3_5MoeTextConfig",
        {"head_dim": 8, **_EXPERTS, **_LINEAR, "shared_expert_intermediate_size": 8},
    ),
    "olmo_hybrid": ("OlmoHybridConfig", _LINEAR),
    "kimi_linear": ("KimiLinearConfig", _CHANNELS),
    "bailing_hybrid": (
        "BailingHybridConfig",
        # States that last, as below: this is the bound of decays.
        {**_CHANNELS, "num_mtp_layers": 0, "kda_lower_bound": -0.2},
    ),
    "mistral": ("MistralConfig", {"sliding_window": 4, "head_dim": 8}),
}


def model(family: str, implementation: str = "sdpa", **changes: Any) -> Any:
    """Return a causal LM of a family in training mode, the same in every process."""
    name, own = _CONFIGS[family]
    config = getattr(transformers, name)(**{**_SHARED, **own, **changes})
    config._attn_implementation = implementation
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(config).float().train()
    for name, parameter in made.named_parameters():
        if name.endswith("A_log"):
            # States that last: with upstream's, a rule forgets what is a few positions back.
            torch.nn.init.uniform_(parameter, -4.0, -1.0)
    return made


def batch(kind: str, length: int = 16, rows: int = 2) -> dict[str, torch.Tensor]:
    """Return a batch: ``plain``, ``packed`` (position_ids begin anew) or ``padded`` on the right."""
    generator = torch.Generator().manual_seed(length)
    rows = 1 if kind == "packed" else rows
    ids = torch.randint(3, VOCABULARY, (rows, length), generator=generator)
    labels = ids.clone()
    given = {"input_ids": ids, "labels": labels}
    if kind == "packed":
        first = length // 3
        positions = torch.cat([torch.arange(first), torch.arange(length - first)])[None]
        labels[:, first] = -100
        given["position_ids"] = positions
    elif kind == "padded":
        mask = torch.ones_like(ids)
        mask[-1, length // 2 :] = 0
        labels[mask == 0] = -100
        given["attention_mask"] = mask
    else:
        labels[:, :3] = -100
    return given
