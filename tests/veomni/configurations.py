"""Small configurations of the models that VeOmni patches: two or three layers, and sizes that differ."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

VOCABULARY = 99
#: Tokens with a meaning, at the end of the vocabulary.
IMAGE, VIDEO, VISION_START, VISION_END, AUDIO, AUDIO_START, AUDIO_END = range(90, 97)
#: Bins of the sound's spectrum.
MELS = 16

TEXT = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
HEAD = {**TEXT, "head_dim": 8}
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "output_router_logits": True,
}  # fmt: skip
LATENT = {
    **TEXT, "num_hidden_layers": 3, "num_key_value_heads": 4, "moe_intermediate_size": 24,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "kv_lora_rank": 16, "q_lora_rank": 24,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 12, "n_group": 2, "topk_group": 1,
}  # fmt: skip
SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
SIGHT = {"depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32}  # fmt: skip
WINDOWS = {"patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]}
PLACES = {"num_position_embeddings": 16}
TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
}
STARTS = {
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
    "audio_start_token_id": AUDIO_START,
    "audio_end_token_id": AUDIO_END,
}
LINEAR = {
    **HEAD,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rope_parameters": {**SECTIONS, "partial_rotary_factor": 1.0, "mrope_interleaved": True},
}
INTERLEAVED = {"rope_parameters": {**SECTIONS, "mrope_interleaved": True}}
SOUND = {
    "num_mel_bins": MELS, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 24,
    "d_model": 16, "max_source_positions": 60, "n_window": 50, "output_dim": 32,
}  # fmt: skip

#: By folder of VeOmni: the class that is trained, and others whose code VeOmni patches.
CLASSES: dict[str, tuple[str, ...]] = {
    "llama": ("LlamaForCausalLM", "LlamaForSequenceClassification"),
    "qwen2": ("Qwen2ForCausalLM",),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3ForSequenceClassification"),
    "qwen3_moe": ("Qwen3MoeForCausalLM",),
    "deepseek_v3": ("DeepseekV3ForCausalLM",),
    "deepseek_v4": ("DeepseekV4ForCausalLM",),
    "gemma3": ("Gemma3ForCausalLM",),
    "glm_moe_dsa": ("GlmMoeDsaForCausalLM",),
    "gpt_oss": ("GptOssForCausalLM",),
    "qwen2_vl": ("Qwen2VLForConditionalGeneration",),
    "qwen2_5vl": ("Qwen2_5_VLForConditionalGeneration",),
    "qwen2_5_omni": ("Qwen2_5OmniForConditionalGeneration",),
    "qwen3_vl": ("Qwen3VLForConditionalGeneration",),
    "qwen3_vl_moe": ("Qwen3VLMoeForConditionalGeneration",),
    "qwen3_5": ("Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM"),
    "qwen3_5_moe": ("Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeForCausalLM"),
    "qwen3_omni_moe": ("Qwen3OmniMoeForConditionalGeneration",),
    "seed_oss": ("SeedOssForCausalLM",),
}
LABELS = 3

#: By folder of VeOmni: transformers' family, its configuration class, and what the class is called with.
CONFIGURATIONS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "LlamaConfig", HEAD),
    "qwen2": ("qwen2", "Qwen2Config", TEXT),
    "qwen3": ("qwen3", "Qwen3Config", HEAD),
    "qwen3_moe": ("qwen3_moe", "Qwen3MoeConfig", {**HEAD, **EXPERTS, "norm_topk_prob": True, "mlp_only_layers": [0]}),
    "deepseek_v3": ("deepseek_v3", "DeepseekV3Config", {**LATENT, "first_k_dense_replace": 1}),
    "deepseek_v4": (
        "deepseek_v4",
        "DeepseekV4Config",
        {
            **TEXT,
            "num_hidden_layers": 3,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "partial_rotary_factor": 0.5,
            "q_lora_rank": 24,
            "moe_intermediate_size": 24,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": [
                "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention",
            ],
            "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
            "mlp_layer_types": ["hash_moe", "moe", "moe"],
            "hc_mult": 2,
            "sliding_window": 8,
            "o_groups": 2,
            "o_lora_rank": 8,
            "index_n_heads": 2,
            "index_head_dim": 16,
            "index_topk": 3,
            "output_router_logits": True,
        },
    ),
    "gemma3": (
        "gemma3",
        "Gemma3TextConfig",
        {
            **HEAD,
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 8,
            "query_pre_attn_scalar": 8,
        },
    ),
    "glm_moe_dsa": (
        "glm_moe_dsa",
        "GlmMoeDsaConfig",
        {
            **LATENT,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "index_topk": 6,
            "index_head_dim": 16,
            "index_n_heads": 2,
            "indexer_types": ["full", "full", "shared"],
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        "GptOssConfig",
        {
            **HEAD, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8,
            "output_router_logits": True,
        },
    ),
    "qwen2_vl": (
        "qwen2_vl",
        "Qwen2VLConfig",
        {
            "text_config": {**TEXT, "rope_parameters": SECTIONS},
            "vision_config": {"depth": 2, "embed_dim": 16, "num_heads": 2, "hidden_size": 32},
            **TOKENS,
        },
    ),
    "qwen2_5vl": (
        "qwen2_5_vl",
        "Qwen2_5_VLConfig",
        {
            "text_config": {**TEXT, "rope_parameters": SECTIONS},
            "vision_config": {**SIGHT, **WINDOWS},
            **TOKENS,
        },
    ),
    "qwen2_5_omni": (
        "qwen2_5_omni",
        "Qwen2_5OmniConfig",
        {
            "thinker_config": {
                "text_config": {**TEXT, "rope_parameters": SECTIONS},
                "vision_config": {**SIGHT, **WINDOWS},
                "audio_config": SOUND,
                "image_token_index": IMAGE,
                "video_token_index": VIDEO,
                "audio_token_index": AUDIO,
                **STARTS,
            }
        },
    ),
    "qwen3_vl": (
        "qwen3_vl",
        "Qwen3VLConfig",
        {
            "text_config": {**HEAD, **INTERLEAVED},
            "vision_config": {**SIGHT, **PLACES, "deepstack_visual_indexes": [0, 1]},
            **TOKENS,
        },
    ),
    "qwen3_vl_moe": (
        "qwen3_vl_moe",
        "Qwen3VLMoeConfig",
        {
            "text_config": {**HEAD, **EXPERTS, **INTERLEAVED},
            "vision_config": {**SIGHT, **PLACES, "deepstack_visual_indexes": [0, 1]},
            **TOKENS,
        },
    ),
    "qwen3_5": ("qwen3_5", "Qwen3_5Config", {"text_config": LINEAR, "vision_config": {**SIGHT, **PLACES}, **TOKENS}),
    "qwen3_5_moe": (
        "qwen3_5_moe",
        "Qwen3_5MoeConfig",
        {
            "text_config": {**LINEAR, **EXPERTS, "shared_expert_intermediate_size": 24},
            "vision_config": {**SIGHT, **PLACES},
            **TOKENS,
        },
    ),
    "qwen3_omni_moe": (
        "qwen3_omni_moe",
        "Qwen3OmniMoeConfig",
        {
            "thinker_config": {
                "text_config": {**HEAD, **EXPERTS, **INTERLEAVED},
                "vision_config": {**SIGHT, **PLACES, "deepstack_visual_indexes": [0, 1]},
                "audio_config": {**SOUND, "downsample_hidden_size": 8, "n_window_infer": 100},
                "audio_token_id": AUDIO,
                "image_token_id": IMAGE,
                "video_token_id": VIDEO,
                **STARTS,
            }
        },
    ),
    "seed_oss": ("seed_oss", "SeedOssConfig", {**HEAD, "attention_dropout": 0.0, "residual_dropout": 0.0}),
}  # fmt: skip


def patch(folder: str) -> int:
    """How many numbers a patch of a picture has: channels, frames, height and width (VeOmni's dummies fix them)."""
    side = 14 if folder.startswith("qwen2") else 16
    return 3 * 2 * side * side


def configuration(folder: str, trained: str) -> Any:
    """The small configuration of a class; VeOmni's configuration class where it has its own."""
    family, name, values = CONFIGURATIONS[folder]
    module = f"transformers.models.{family}.configuration_{family}"
    if find_spec(own := f"veomni.models.transformers.{folder}.configuration_{family}"):
        module = own
    config = getattr(import_module(module), name)(**values)
    if trained.endswith("ForCausalLM"):
        return config.get_text_config()
    if trained.endswith("ForSequenceClassification"):
        config.num_labels = LABELS
    return config
