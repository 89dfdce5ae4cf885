"""Models of a few thousand weights, each in a folder with a tokenizer, as `from_pretrained` reads them."""

from __future__ import annotations

from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCABULARY = 400
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,  # at 0.02 a model of this width answers the same to everything
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}
EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}


def tokenizer() -> PreTrainedTokenizerFast:
    """Return byte pairs of Python's own documentation."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<pad>", "<eos>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    made.train_from_iterator(list(topics.values())[:20], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        eos_token="<eos>",
        padding_side="left",
        chat_template="{% for message in messages %}{{ message.content }}\n{% endfor %}",
    )


def dense(folder: Path, **changes: Any) -> Path:
    """Save a Qwen3 and its tokenizer."""
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**{**SIZES, **changes})).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def with_experts(folder: Path) -> Path:
    """Save a Qwen3-MoE and its tokenizer."""
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **EXPERTS)).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def with_linear_attention(folder: Path) -> Path:
    """Save a Qwen3.5 of one layer of linear attention and one of full attention, and its tokenizer."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    torch.manual_seed(0)
    sizes = {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    }
    kinds = ["linear_attention", "full_attention"]
    Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SIZES, **sizes, layer_types=kinds)).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


#: What a processor of Qwen3-VL puts around images, and into their places.
MARKS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: "
    "{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}\n{% endfor %}"
)
SIGHT = {
    "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32,
    "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
}  # fmt: skip


def with_sight(folder: Path) -> Path:
    """Save a Qwen3-VL and its processor, which needs torchvision."""
    from transformers import (
        Qwen2VLImageProcessor,
        Qwen3VLConfig,
        Qwen3VLForConditionalGeneration,
        Qwen3VLProcessor,
        Qwen3VLVideoProcessor,
    )

    words = tokenizer()
    words.add_special_tokens({"additional_special_tokens": MARKS})
    for name in ("image", "video"):
        setattr(words, f"{name}_token", f"<|{name}_pad|>")
    start, end, image, video = words.convert_tokens_to_ids(MARKS)
    sections = {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    }
    config = Qwen3VLConfig(
        text_config={**SIZES, "vocab_size": len(words), "rope_parameters": sections},
        vision_config=SIGHT,
        image_token_id=image, video_token_id=video, vision_start_token_id=start, vision_end_token_id=end,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen3VLForConditionalGeneration(config).save_pretrained(folder)
    Qwen3VLProcessor(
        Qwen2VLImageProcessor(patch_size=16, min_pixels=32 * 32, max_pixels=128 * 128),
        words,
        Qwen3VLVideoProcessor(),
        chat_template=TEMPLATE,
    ).save_pretrained(folder)
    return folder
