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
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def dense(folder: Path) -> Path:
    """Save a Qwen3 and its tokenizer."""
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**SIZES)).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def with_experts(folder: Path) -> Path:
    """Save a Qwen3-MoE and its tokenizer."""
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **EXPERTS)).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder
