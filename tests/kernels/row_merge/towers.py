"""Small models with a tower and placeholder tokens, and batches for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from tests.kernels.patched_qwen3 import config_of

TEXT = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
IMAGE, VIDEO, START, END = 60, 61, 62, 63


class Family(NamedTuple):
    """A family of models by its name, its class, and what makes a config and a batch."""

    name: str
    model: str
    config: Callable[[], Any]
    batch: Callable[[], dict[str, torch.Tensor]]
    variants: tuple[str, ...] = ("rows",)


def _ids(rows: list[list[int]]) -> dict[str, torch.Tensor]:
    ids = torch.tensor(rows)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clamp(max=40)}


def _llava_config() -> Any:
    vision = {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
        "image_size": 8, "patch_size": 4, "projection_dim": 16, "model_type": "clip_vision_model",
    }  # fmt: skip
    return config_of("llava", "LlavaConfig", 
        text_config={**TEXT, "model_type": "llama"}, vision_config=vision, image_token_id=IMAGE,
        vision_feature_layer=-1,
    )  # fmt: skip


def _llava_batch() -> dict[str, torch.Tensor]:
    image = [IMAGE] * 4
    return {**_ids([[1, *image, 5, 6, 7], [2, 3, 4, *image, 8]]), "pixel_values": torch.randn(2, 3, 8, 8)}


_QWEN = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 4,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 32, "in_channels": 3,
}  # fmt: skip
_ROTARY = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
_TOKENS = {
    "image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END,
}  # fmt: skip


def _qwen2_5_vl_config() -> Any:
    vision = {**_QWEN, "window_size": 16, "fullatt_block_indexes": [1]}
    text = {**TEXT, "rope_parameters": _ROTARY}
    return config_of("qwen2_5_vl", "Qwen2_5_VLConfig", text_config=text, vision_config=vision, **_TOKENS)


def _qwen3_vl_config() -> Any:
    vision = {**_QWEN, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
    text = {**TEXT, "head_dim": 8, "rope_parameters": {**_ROTARY, "mrope_interleaved": True}}
    return config_of("qwen3_vl", "Qwen3VLConfig", text_config=text, vision_config=vision, **_TOKENS)


def _qwen_batch(*, video: bool = False) -> dict[str, torch.Tensor]:
    """An image of 4 x 4 patches, which are 4 tokens, in each row; a video of 8 patches in the first."""
    image = [START, *[IMAGE] * 4, END]
    moving = [START, *[VIDEO] * 4, END] if video else [9] * 6
    ids = _ids([[1, *image, *moving, 5], [2, 3, *image, 10, 11, 12, 13, 14, 15]])
    patch = 3 * 2 * 4 * 4
    grid = torch.tensor([[1, 4, 4], [1, 4, 4]])
    types = (ids["input_ids"] == IMAGE).int() + 2 * (ids["input_ids"] == VIDEO).int()
    found = {
        **ids, "pixel_values": torch.randn(32, patch), "image_grid_thw": grid, "mm_token_type_ids": types,
    }  # fmt: skip
    if video:
        found |= {"pixel_values_videos": torch.randn(16, patch), "video_grid_thw": grid[:1]}
    return found


def _gemma3_config() -> Any:
    vision = {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
        "image_size": 16, "patch_size": 4, "vision_use_head": False,
    }  # fmt: skip
    text = {**TEXT, "head_dim": 8, "sliding_window": 8, "pad_token_id": 0}
    return config_of("gemma3", "Gemma3Config", 
        text_config=text, vision_config=vision, image_token_id=IMAGE, mm_tokens_per_image=4,
        boi_token_id=START, eoi_token_id=END,
    )  # fmt: skip


def _gemma3_batch() -> dict[str, torch.Tensor]:
    image = [START, *[IMAGE] * 4, END]
    ids = _ids([[1, *image, 5, 6], [2, 3, *image, 8]])
    types = (ids["input_ids"] == IMAGE).long()
    return {**ids, "pixel_values": torch.randn(2, 3, 16, 16), "token_type_ids": types}


FAMILIES = {
    "llava": Family(
        "llava",
        "LlavaForConditionalGeneration",
        _llava_config,
        _llava_batch,
    ),
    "qwen2_5_vl": Family(
        "qwen2_5_vl",
        "Qwen2_5_VLForConditionalGeneration",
        _qwen2_5_vl_config,
        lambda: _qwen_batch(video=True),
    ),
    "qwen3_vl": Family(
        "qwen3_vl",
        "Qwen3VLForConditionalGeneration",
        _qwen3_vl_config,
        _qwen_batch,
        ("rows", "rows_added"),
    ),
    "qwen3_vl with a video": Family(
        "qwen3_vl",
        "Qwen3VLForConditionalGeneration",
        _qwen3_vl_config,
        lambda: _qwen_batch(video=True),
        ("rows", "rows_added"),
    ),
    "gemma3": Family(
        "gemma3",
        "Gemma3ForConditionalGeneration",
        _gemma3_config,
        _gemma3_batch,
    ),
}
