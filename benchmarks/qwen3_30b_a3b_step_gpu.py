"""A step of Qwen3-30B-A3B's shapes, with 4 layers or more: `python -m benchmarks.qwen3_30b_a3b_step_gpu`.

Upstream's side has its default for experts, ``grouped_mm``. Liger's kernels for experts search their
configurations in the first step unless told not to; that step had not ended after 210 s, so they are told.
The floor takes experts' products as those of one matrix each with a token's share of the rows.
"""

from __future__ import annotations

from typing import Any

from benchmarks._train_step import BATCH, LENGTH, Case, main

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 2048, 768, 32, 4, 128, 151_936
EXPERTS, TOP_K = 128, 8
TOKENS = BATCH * LENGTH


def model(layers: int) -> Any:
    """Build it."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        moe_intermediate_size=INTERMEDIATE,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        norm_topk_prob=True,
        mlp_only_layers=[],
        decoder_sparse_step=1,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
    )
    return Qwen3MoeForCausalLM(config)


if __name__ == "__main__":
    main(
        Case(
            name="qwen3_30b_a3b_step_gpu",
            description=__doc__,
            model=model,
            liger="apply_liger_kernel_to_qwen3_moe",
            floor=(
                (TOKENS, HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_DIM),
                (TOKENS, HEADS * HEAD_DIM, HIDDEN),
                (TOKENS, HIDDEN, EXPERTS),
                (TOKENS * TOP_K, HIDDEN, 2 * INTERMEDIATE),
                (TOKENS * TOP_K, INTERMEDIATE, HIDDEN),
            ),
            # In the pieces that no logits of all tokens stand in memory at once.
            head=(TOKENS // 8, HIDDEN, VOCABULARY, 8),
            heads=(HEADS, KV_HEADS, HEAD_DIM),
            vocabulary=VOCABULARY,
            environment={"liger": {"LIGER_FUSED_MOE_AUTOTUNE": "0"}},
        )
    )
