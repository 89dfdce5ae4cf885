"""Tiny configurations of the two families with parts for speech."""

from __future__ import annotations

from typing import Any

_TEXT = {
    "vocab_size": 67, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
}  # fmt: skip
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
_AUDIO = {
    "num_mel_bins": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16,
    "d_model": 16, "output_dim": 32,
}  # fmt: skip
_VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}

_TOKENS = {"vision_start_token_id": 60, "vision_end_token_id": 61, "audio_start_token_id": 62}

DENSE: dict[str, Any] = {
    "thinker_config": {
        **_TOKENS,
        "text_config": {**_TEXT, "rope_parameters": _MROPE, "tie_word_embeddings": False},
        "audio_config": _AUDIO,
        "vision_config": {**_VISION, "fullatt_block_indexes": [0]},
    },
    "talker_config": {**_TEXT, "embedding_size": 32, "rope_parameters": _MROPE, "tts_codec_pad_token_id": 1},
    "token2wav_config": {
        "dit_config": {
            "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "emb_dim": 8, "head_dim": 16,
            "num_embeds": 9, "enc_channels": [16, 16, 16], "enc_kernel_sizes": [3, 3, 1],
            "enc_dilations": [1, 2, 1], "enc_dim": 8, "enc_emb_dim": 8, "enc_attention_channels": 8,
            "enc_res2net_scale": 2, "enc_se_channels": 8, "mel_dim": 8,
        },
        "bigvgan_config": {
            "mel_dim": 8, "upsample_initial_channel": 16, "upsample_rates": [2, 2],
            "upsample_kernel_sizes": [4, 4],
        },
    },
}  # fmt: skip
MIXTURE: dict[str, Any] = {
    "thinker_config": {
        **_TOKENS,
        "text_config": {**_TEXT, **_EXPERTS, "rope_parameters": _MROPE},
        "audio_config": {**_AUDIO, "downsample_hidden_size": 8},
        "vision_config": {**_VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
    },
    "talker_config": {
        "text_config": {**_TEXT, **_EXPERTS, "rope_parameters": _MROPE, "shared_expert_intermediate_size": 8},
        "code_predictor_config": {**_TEXT, "num_code_groups": 2},
        "num_code_groups": 2,
        "thinker_hidden_size": 32,
        "spatial_merge_size": 2,
    },
    "code2wav_config": {
        "codebook_size": 8, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2,
        "intermediate_size": 16, "num_hidden_layers": 1, "num_quantizers": 2, "upsample_rates": [2],
        "upsampling_ratios": [2], "decoder_dim": 16,
    },
}  # fmt: skip
#: Family, configuration.
FAMILIES = {"qwen2_5_omni": DENSE, "qwen3_omni_moe": MIXTURE}
#: Family, attributes of the parts that make speech.
PARTS = {"qwen2_5_omni": ["talker", "token2wav"], "qwen3_omni_moe": ["talker", "code2wav"]}


def config(family: str, **values: Any) -> Any:
    """Return the tiny configuration of a family; ``values`` replace fields of the top level."""
    from transformers import AutoConfig

    return AutoConfig.for_model(family, **{**FAMILIES[family], **values})


def top_class(family: str) -> Any:
    """Return the class of a family whose instances may have parts for speech."""
    from importlib import import_module

    module = import_module(f"transformers.models.{family}.modeling_{family}")
    return next(
        each
        for name, each in vars(module).items()
        if name.endswith("OmniForConditionalGeneration") or name == "Qwen3OmniMoeForConditionalGeneration"
    )
