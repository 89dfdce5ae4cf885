"""Batches of text alone, for small models with towers that pretend to be shared.

    python -m tests.multimodal.facts_of_absent

The hook is on if the environment has ``FACTS_HOOK=1``. Prints, for each family: how often its towers were
called, whether the output has the same bits as without the call, how many parameters of the towers have no
gradient, and the largest gradient.
"""

from __future__ import annotations

import json
import os
from typing import Any

if os.environ.get("FACTS_HOOK") == "1":
    import veomni_hook.install  # noqa: F401

import torch
from torch import nn
from transformers import AutoConfig, AutoModel

from veomni_hook.multimodal import absent

_SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
_TEXT = {**_SIZES, "num_key_value_heads": 2, "vocab_size": 64, "head_dim": 8, "pad_token_id": 0}
_CLIP = {"model_type": "clip_vision_model", **_SIZES, "image_size": 8, "patch_size": 4, "projection_dim": 16}
#: The configuration of each family, and its towers.
FAMILIES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "mistral3": (
        {
            "text_config": {"model_type": "mistral", **_TEXT},
            "vision_config": {
                "model_type": "pixtral", **_SIZES, "head_dim": 8, "patch_size": 4, "image_size": 32,
            },
            "vision_feature_layer": -1,
        },
        ("vision_tower", "multi_modal_projector"),
    ),
    "llava_next": (
        {
            "text_config": {"model_type": "llama", **_TEXT},
            "vision_config": _CLIP,
            "image_grid_pinpoints": [[8, 16], [16, 16]],
            "vision_feature_layer": -1,
        },
        ("vision_tower", "multi_modal_projector"),
    ),
    "idefics3": (
        {
            "text_config": {"model_type": "llama", **_TEXT},
            "vision_config": {**_SIZES, "image_size": 16, "patch_size": 4},
            "scale_factor": 2,
        },
        ("vision_model", "connector"),
    ),
    "gemma4": (
        {
            "text_config": {
                **_TEXT, "vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 0,
                "layer_types": ["full_attention"], "num_kv_shared_layers": 0, "global_head_dim": 8,
            },
            "vision_config": {**_SIZES, "num_key_value_heads": 2, "head_dim": 8, "patch_size": 4},
            "audio_config": {**_SIZES, "output_proj_dims": 16},
        },
        ("vision_tower", "audio_tower"),
    ),
}  # fmt: skip


def small(family: str) -> nn.Module:
    """The model of a family, the same in every process."""
    torch.manual_seed(0)
    made: nn.Module = AutoModel.from_config(AutoConfig.for_model(family, **FAMILIES[family][0])).train()
    return made


def facts(family: str) -> dict[str, Any]:
    """Run a step of text with and without the call of the towers."""
    towers, made = FAMILIES[family][1], small(family)
    inputs = {"input_ids": torch.tensor([[5, 6, 7, 8]]), "use_cache": False}
    if family == "gemma4":
        inputs["mm_token_type_ids"] = torch.zeros(1, 4, dtype=torch.int64)
    truth = made(**inputs).last_hidden_state
    counts = dict.fromkeys(towers, 0)

    def counted(name: str) -> Any:
        def count(*_: Any) -> None:
            counts[name] += 1

        return count

    for name in towers:
        getattr(made, name).register_forward_pre_hook(counted(name))
    world, sharded = absent.distributed.get_world_size, absent.is_sharded
    initialized = absent.distributed.is_initialized
    absent.distributed.is_initialized = lambda: True
    absent.distributed.get_world_size = lambda *_: 2
    absent.is_sharded = lambda towers: True
    try:
        found = made(**inputs).last_hidden_state
    finally:
        absent.distributed.get_world_size, absent.is_sharded = world, sharded
        absent.distributed.is_initialized = initialized
    found.sum().backward()
    held = [each for name in towers for each in getattr(made, name).parameters()]
    gradients = [each.grad for each in held if each.grad is not None]
    return {
        "calls": counts,
        "same": torch.equal(found, truth),
        "without": len(held) - len(gradients),
        "largest": max((each.abs().max().item() for each in gradients), default=-1.0),
    }


if __name__ == "__main__":
    print(json.dumps({family: facts(family) for family in FAMILIES}))
