"""Models of milliseconds, what a step of theirs gives, and what became of their kernels."""

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    NemotronConfig,
    NemotronForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "output_router_logits": True,
}  # fmt: skip
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": False}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"tie_word_embeddings": True}),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM, EXPERTS),
    "gemma3_text": (Gemma3TextConfig, Gemma3ForCausalLM, {}),
    "nemotron": (NemotronConfig, NemotronForCausalLM, {}),
}
IDS = torch.arange(1, 25).reshape(2, 12)


def make(family="qwen3"):
    """Return a model with the same weights at every call, norms not at one."""
    config, kind, changes = FAMILIES[family]
    torch.manual_seed(0)
    model = kind(config(**SIZES, **changes)).train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def step(model):
    """Return the loss of one step and every gradient."""
    model.zero_grad()
    loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    return loss.item(), {name: each.grad.clone() for name, each in model.named_parameters()}


def difference(one, other):
    """The largest difference of two results of `step`, relative to the largest gradient."""
    assert one[1].keys() == other[1].keys()
    largest = max(each.abs().max() for each in one[1].values())
    gradients = max((each - other[1][name]).abs().max() for name, each in one[1].items())
    return max(abs(one[0] - other[0]), float(gradients / largest))


def ran(explanation):
    """The ops that a backend other than upstream's code computed, with their backends."""
    rows = [row for row in explanation.rows if row.called and row.backend != "eager"]
    return {f"{row.op}/{row.variant}": row.backend for row in rows}
