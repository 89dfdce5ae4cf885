"""Small models of every formula of routers, patched beside the installed module."""

from __future__ import annotations

import importlib
from pathlib import Path

import torch
from torch import nn

from tests.kernels.patched_qwen3 import SIZES, load

MOE = {
    **SIZES, "moe_intermediate_size": 16, "num_experts_per_tok": 3, "norm_topk_prob": True,
    "tie_word_embeddings": False,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip
#: By family: class names without their endings, and sizes. One for each formula, and two for softmax_topk.
FAMILIES = {
    "qwen3_moe": ("Qwen3Moe", {**MOE, "num_experts": 8}),
    "olmoe": ("Olmoe", {**MOE, "num_experts": 8, "norm_topk_prob": False}),
    "gpt_oss": ("GptOss", {**MOE, "num_local_experts": 8, "sliding_window": 6}),
    "minimax_m2": ("MiniMaxM2", {**MOE, "num_local_experts": 8}),
    "deepseek_v3": (
        "DeepseekV3",
        {
            **MOE, **LATENT, "n_routed_experts": 16, "n_group": 4, "topk_group": 2,
            "first_k_dense_replace": 1, "num_key_value_heads": 4,
        },
    ),
}  # fmt: skip


def made(family: str, folder: Path, **changes: object) -> nn.Module:
    """Return a patched causal model of ``family`` in training mode, whose routers differ between experts."""
    name, sizes = FAMILIES[family]
    module = load(folder, f"transformers.models.{family}.modeling_{family}")
    of_family = importlib.import_module(f"transformers.models.{family}.configuration_{family}")
    torch.manual_seed(0)
    model = getattr(module, f"{name}ForCausalLM")(getattr(of_family, f"{name}Config")(**{**sizes, **changes}))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.train()


def steps(model: nn.Module, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return loss and gradients of a forward and backward pass."""
    model.zero_grad()
    loss = model(**inputs, use_cache=False).loss
    loss.backward()
    return loss.detach(), grads(model)


def grads(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
