"""A training step of Qwen3-8B's shapes, with 4 layers or more: `python -m benchmarks.qwen3_8b_step_gpu`."""

from __future__ import annotations

from typing import Any

from benchmarks._train_step import BATCH, LENGTH, Case, main

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 4096, 12288, 32, 8, 128, 151_936
TOKENS = BATCH * LENGTH


def model(layers: int) -> Any:
    """Build it."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
    )
    return Qwen3ForCausalLM(config)


if __name__ == "__main__":
    main(
        Case(
            name="qwen3_8b_step_gpu",
            description=__doc__,
            model=model,
            liger="apply_liger_kernel_to_qwen3",
            floor=(
                (TOKENS, HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_DIM),
                (TOKENS, HEADS * HEAD_DIM, HIDDEN),
                (TOKENS, HIDDEN, 2 * INTERMEDIATE),
                (TOKENS, INTERMEDIATE, HIDDEN),
            ),
            # In the pieces that no logits of all tokens stand in memory at once.
            head=(TOKENS // 8, HIDDEN, VOCABULARY, 8),
            heads=(HEADS, KV_HEADS, HEAD_DIM),
            vocabulary=VOCABULARY,
            environment={},
        )
    )
