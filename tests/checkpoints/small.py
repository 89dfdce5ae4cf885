"""Small models of real families, as transformers builds and saves them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open

E, H, INTER = 4, 16, 12

FLAT = {
    "hidden_size": H, "intermediate_size": 20, "moe_intermediate_size": INTER, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 32,
    "num_experts_per_tok": 2, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 2, "n_routed_experts": E, "n_group": 2, "topk_group": 1,
    "first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4, "v_head_dim": 8,
}  # fmt: skip
VISION = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": H,
    "deepstack_visual_indexes": [0],
}  # fmt: skip
ROPE = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4}


@dataclass(frozen=True)
class Family:
    """How a family is built, and what its checkpoints look like.

    Attributes:
        name: prefix of the classes in transformers.
        config: arguments of its config.
        layout: what ``save_pretrained`` writes.
        kind: suffix of the model's class.
        load: arguments of ``from_any`` that its names need.
        save: arguments of the way back.
        sparse: the layers that have experts.
    """

    name: str
    config: dict[str, Any]
    layout: str = "per_expert"
    kind: str = "ForCausalLM"
    load: dict[str, Any] = field(default_factory=dict)
    save: dict[str, Any] = field(default_factory=dict)
    sparse: tuple[int, ...] = (0, 1)


BLOCK = ("block_sparse_moe", "mlp")

FAMILIES = {
    "qwen3_moe": Family("Qwen3Moe", FLAT | {"num_experts": E}),
    "qwen2_moe": Family("Qwen2Moe", FLAT | {"num_experts": E, "shared_expert_intermediate_size": 8}),
    "mixtral": Family(
        "Mixtral",
        FLAT | {"num_local_experts": E, "intermediate_size": INTER},
        load={"block": BLOCK},
        save={"block": BLOCK, "projections": ("w1", "w3", "w2")},
    ),
    "olmoe": Family("Olmoe", FLAT | {"num_experts": E, "intermediate_size": INTER}),
    "deepseek_v3": Family("DeepseekV3", FLAT | LATENT, sparse=(1,)),
    "glm4_moe": Family("Glm4Moe", FLAT | {"n_routed_experts": E, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}, sparse=(1,)),
    "qwen3_vl_moe": Family(
        "Qwen3VLMoe",
        {"text_config": FLAT | {"num_experts": E, "rope_parameters": ROPE}, "vision_config": VISION},
        layout="fused",
        kind="ForConditionalGeneration",
    ),
}  # fmt: skip


def config_of(family: Family, **changes: Any) -> Any:
    options = dict(family.config)
    if "text_config" in options:
        options["text_config"] = dict(options["text_config"]) | changes
        options["vision_config"] = dict(options["vision_config"])
    else:
        options |= changes
    return getattr(transformers, f"{family.name}Config")(**options)


def model_of(family: Family, **changes: Any) -> Any:
    model = getattr(transformers, f"{family.name}{family.kind}")(config_of(family, **changes))
    with torch.no_grad():
        # Not upstream's initialisation: some of it is zeros, which look alike wherever they end up.
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return model


def saved(model: Any, folder: Path, *, shard: str = "12KB") -> dict[str, torch.Tensor]:
    """Save as transformers does, in several shards, and return what lies on disk."""
    model.save_pretrained(folder, max_shard_size=shard)
    return dict(stored(folder))


def stored(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """One tensor at a time, file by file."""
    files = sorted(folder.glob("*.safetensors"))
    assert files
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():
                yield name, opened.get_tensor(name)


def written_config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


def transposed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What a checkpoint holds that was published with its fused experts transposed."""
    ends = (".experts.gate_up_proj", ".experts.down_proj")
    return {n: t.transpose(1, 2).contiguous() if n.endswith(ends) else t for n, t in tensors.items()}


def through(
    converter: Any, tensors: dict[str, torch.Tensor] | Iterator[tuple[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """What a streaming loader does."""
    items = tensors.items() if isinstance(tensors, dict) else tensors
    converted: dict[str, torch.Tensor] = {}
    for name, tensor in items:
        made = converter.convert(name, tensor) if converter.can_handle(name) else [(name, tensor)]
        for key, value in made:
            assert key not in converted
            converted[key] = value
    converter.finalize()
    return converted


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    """Bit by bit, and in dtype, and no tensor more or less."""
    assert found.keys() == wanted.keys()
    return all(
        found[name].dtype == wanted[name].dtype and torch.equal(found[name], wanted[name]) for name in wanted
    )
