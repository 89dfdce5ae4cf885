"""The families of `families_gpu`: real shapes with few layers, as data."""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["FAMILIES", "Family", "shape"]


class Family(NamedTuple):
    """A model and the step that is measured.

    Attributes:
        model_type: of its config in transformers; Liger knows its function by it.
        fields: of the config.
        batch, length: sequences and their tokens.
        attention: the implementation that the user names; None: nobody chose.
        decode: whether its decoding is measured as well.
    """

    model_type: str
    fields: dict[str, Any]
    batch: int = 2
    length: int = 4096
    attention: str | None = None
    decode: bool = False


def shape(hidden: int, inner: int, layers: int, heads: str, vocabulary: int, **more: Any) -> dict[str, Any]:
    """Return the fields that all configs share; ``heads`` are those of queries, of keys, and their width."""
    queries, keys, width = map(int, heads.split())
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": queries,
        "num_key_value_heads": keys,
        "head_dim": width,
        "vocab_size": vocabulary,
        "tie_word_embeddings": False,
        **more,
    }


_GPT_OSS = shape(2880, 2880, 2, "64 8 64", 201_088, num_local_experts=32, num_experts_per_tok=4)

_DEEPSEEK = shape(7168, 18432, 2, "128 128 192", 129_280) | {
    **{"moe_intermediate_size": 2048, "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8},
    **{"first_k_dense_replace": 1, "q_lora_rank": 1536, "kv_lora_rank": 512},
    **{"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
}
# Its config derives the width of a head from those.
del _DEEPSEEK["head_dim"]

FAMILIES = {
    "Qwen3-30B-A3B": Family(
        "qwen3_moe",
        shape(2048, 6144, 3, "32 4 128", 151_936)
        | {"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8},
    ),
    "Qwen3-8B": Family("qwen3", shape(4096, 12288, 3, "32 8 128", 151_936)),
    "Llama-3-8B": Family("llama", shape(4096, 14336, 3, "32 8 128", 128_256)),
    "OLMo-2-7B": Family("olmo2", shape(4096, 11008, 3, "32 32 128", 100_352)),
    "Mixtral-8x7B": Family(
        "mixtral",
        shape(4096, 14336, 2, "32 8 128", 32_000) | {"num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    "DeepSeek-V3 (64 experts)": Family("deepseek_v3", _DEEPSEEK | {"n_routed_experts": 64}),
    # What each of eight GPUs has of 256.
    "DeepSeek-V3 (32 experts)": Family("deepseek_v3", _DEEPSEEK | {"n_routed_experts": 32}),
    "DeepSeek-V3.2 (64 experts)": Family(
        "deepseek_v32",
        _DEEPSEEK | {"n_routed_experts": 64, "index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048},
        batch=1,
    ),
    # transformers' defaults are the shapes of DeepSeek-V4-Flash. Upstream stores the scores of all heads.
    "DeepSeek-V4-Flash (64 experts)": Family(
        "deepseek_v4",
        {
            "num_hidden_layers": 3,
            "n_routed_experts": 64,
            "layer_types": [
                "sliding_attention",
                "compressed_sparse_attention",
                "heavily_compressed_attention",
            ],
            "mlp_layer_types": ["moe"] * 3,
        },
        batch=1,
    ),
    "ERNIE-4.5-MoE": Family(
        "ernie4_5_moe",
        shape(2560, 12288, 3, "20 4 128", 103_424)
        | {"moe_num_experts": 64, "moe_k": 6, "moe_intermediate_size": 1536},
    ),
    "Qwen2-MoE": Family(
        "qwen2_moe",
        shape(3584, 18944, 2, "28 4 128", 151_936)
        | {"num_experts": 64, "num_experts_per_tok": 8}
        | {"moe_intermediate_size": 2560, "shared_expert_intermediate_size": 20480},
    ),
    "GLM-4-MoE": Family(
        "glm4_moe",
        shape(4096, 10944, 2, "96 8 128", 151_552)
        | {"moe_intermediate_size": 1408, "n_routed_experts": 128, "num_experts_per_tok": 8}
        | {"first_k_dense_replace": 1, "use_qk_norm": True},
    ),
    "Seed-OSS": Family("seed_oss", shape(5120, 27648, 2, "80 8 128", 155_136)),
    "Phi-3-14B": Family("phi3", shape(5120, 17920, 3, "40 10 128", 32_064, pad_token_id=None)),
    "StarCoder2-7B": Family("starcoder2", shape(4608, 18432, 3, "36 4 128", 49_152)),
    "EXAONE-4-32B": Family("exaone4", shape(5120, 27392, 2, "40 8 128", 102_400)),
    "SmolLM3-3B": Family("smollm3", shape(2048, 11008, 4, "16 4 128", 128_256, pad_token_id=None)),
    "Phi-2": Family("phi", shape(2560, 10240, 6, "32 32 80", 51_200)),
    "GPT-2-XL": Family(
        "gpt2",
        {"n_embd": 1600, "num_hidden_layers": 8, "n_head": 25, "vocab_size": 50_257, "n_positions": 1024},
        batch=8,
        length=1024,
    ),
    "Nemotron-4-15B": Family("nemotron", shape(6144, 24576, 2, "48 8 128", 256_000)),
    "Qwen2-7B": Family("qwen2", shape(3584, 18944, 2, "28 4 128", 152_064)),
    # Three layers in four have linear attention; transformers' defaults are the shapes of these models.
    "Qwen3-Next-80B-A3B (128 experts)": Family(
        "qwen3_next", shape(2048, 5632, 4, "16 2 256", 151_936, num_experts=128)
    ),
    "Qwen3.5-9B": Family("qwen3_5_text", shape(4096, 12288, 4, "16 4 256", 248_320)),
    "Qwen3.5-35B-A3B (128 experts)": Family(
        "qwen3_5_moe_text", shape(2048, 5632, 4, "16 2 256", 248_320, num_experts=128)
    ),
    "Gemma-3-12B": Family("gemma3_text", shape(3840, 15360, 3, "16 8 256", 262_208, sliding_window=1024)),
    "Cohere2": Family("cohere2", shape(4096, 14336, 2, "32 8 128", 256_000)),
    "Gemma-2-9B": Family("gemma2", shape(3584, 14336, 2, "16 8 256", 256_000)),
    "Gemma-2-9B (eager attention)": Family(
        "gemma2", shape(3584, 14336, 2, "16 8 256", 256_000), attention="eager"
    ),
    "Granite-8B (vocabulary 49,155)": Family("granite", shape(4096, 12800, 3, "32 8 128", 49_155)),
    "GPT-OSS-20B": Family("gpt_oss", _GPT_OSS),
    "GPT-OSS-20B (flex_attention)": Family("gpt_oss", _GPT_OSS, attention="flex_attention"),
    "Qwen3-0.6B, 28 layers, 1 x 1,024": Family(
        "qwen3",
        shape(1024, 3072, 28, "16 8 128", 151_936) | {"tie_word_embeddings": True},
        batch=1,
        length=1024,
        decode=True,
    ),
}
