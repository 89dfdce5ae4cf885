"""Small models with experts, and their numbers in one process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.distributed.tensor import DTensor

from veomni_hook import bind
from veomni_hook.kernels.selection.process_choice import set_choice
from veomni_hook.parallel import process
from veomni_hook.patches import expert_release

COMMON = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "tie_word_embeddings": False,
}  # fmt: skip
_LATENT = {
    "n_routed_experts": 8, "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 12, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "head_dim": 8,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {
        "moe_intermediate_size": 16, "intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 3,
        "head_dim": 8, "norm_topk_prob": True,
    },
    "GptOss": {"intermediate_size": 16, "num_local_experts": 8, "num_experts_per_tok": 3, "head_dim": 8, "sliding_window": 6},
    "DeepseekV3": {
        **_LATENT, "intermediate_size": 24, "moe_intermediate_size": 16, "num_experts_per_tok": 3, "n_group": 2,
        "topk_group": 1, "first_k_dense_replace": 1,
    },
    "LongcatFlash": {
        **_LATENT, "num_layers": 1, "num_hidden_layers": 2, "ffn_hidden_size": 24, "expert_ffn_hidden_size": 16,
        "zero_expert_num": 0, "moe_topk": 3,
    },
}  # fmt: skip
CLIP = 0.1
OURS, UPSTREAM = "eager,moe_experts=torch", "eager"


def small(family: str, **changes: Any) -> Any:
    """Return a model with random weights, the same on every rank."""
    set_choice(UPSTREAM)
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**COMMON, **FAMILIES[family], **changes})
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model.train()


def saved(folder: Path, family: str) -> Path:
    """Return the folder of a checkpoint of `small`, which rank 0 writes."""
    path = folder / family
    if not path.exists():
        dist.barrier()
        if dist.get_rank() == 0:
            small(family).save_pretrained(path)
    dist.barrier()
    return path


def sharded(
    path: Path, family: str, ep: int, implementation: str, kernels: str = OURS, **options: Any
) -> Any:
    """Return a checkpoint's model on all ranks, its experts on ``ep`` of them; options are transformers'."""
    set_choice(kernels)
    kind = getattr(transformers, f"{family}ForCausalLM")
    if expert_release.dispatches():
        from transformers.distributed import DistributedConfig

        from veomni_hook.parallel.expert_dispatch import register

        register()
        config = DistributedConfig(
            fsdp_size=dist.get_world_size(), ep_size=ep, ep_implementation=implementation, **options
        )
        return kind.from_pretrained(path, distributed_config=config).train()
    with told(f"ep={ep}"):
        return kind.from_pretrained(path).train()


@contextlib.contextmanager
def told(setting: str) -> Iterator[None]:
    """Change the setting for a while."""
    before = process.sizes()
    process.tell(setting)
    try:
        yield
    finally:
        process.tell("" if before == process.Sizes() else str(before))


def whole(path: Path, family: str) -> Any:
    """Return a checkpoint's model in one process."""
    set_choice(UPSTREAM)
    with told(""):
        return getattr(transformers, f"{family}ForCausalLM").from_pretrained(path).train()


def batch(rank: int, length: int = 12) -> dict[str, torch.Tensor]:
    """Return the batch of a rank."""
    ids = torch.randint(0, 64, (2, length), generator=torch.Generator().manual_seed(100 + rank))
    return {"input_ids": ids, "labels": ids.clone()}


def gradients(model: Any) -> dict[str, torch.Tensor]:
    """Return every gradient, whole. All ranks must call."""
    return {
        name: each.grad.full_tensor() if isinstance(each.grad, DTensor) else each.grad
        for name, each in model.named_parameters()
        if each.grad is not None
    }


def alone(
    path: Path, family: str, world: int, experts: str | None = None
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return the losses of all ranks' batches, and the gradients of their mean, in one process.

    ``experts`` is what the model's experts are bound to.
    """
    model = whole(path, family)
    bind(model, moe_experts=experts)
    with told(""):
        losses = [model(**batch(rank)).loss for rank in range(world)]
        (sum(losses) / world).backward()
    return [loss.item() for loss in losses], gradients(model)


def apart(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return the greatest difference of each tensor, relative to its greatest number."""
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    return {
        name: float((found[name] - of).abs().max() / of.abs().max().clamp(min=1e-12))
        for name, of in expected.items()
    }


def steps(
    model: Any, batches: list[dict[str, torch.Tensor]], clip: Any, number: int, optimizer: Any = None
) -> Any:
    """Train for ``number`` steps of AdamW on the mean loss of ``batches``; return the norms and the optimizer."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    norms = []
    for _ in range(number):
        optimizer.zero_grad()
        (sum(model(**each).loss for each in batches) / len(batches)).backward()
        norms.append(float(clip(model.parameters(), CLIP)))
        optimizer.step()
    return norms, optimizer


def parameters(model: Any) -> dict[str, torch.Tensor]:
    """Return every parameter, whole. All ranks must call."""
    return {
        name: each.detach().full_tensor() if isinstance(each, DTensor) else each.detach()
        for name, each in model.named_parameters()
    }
