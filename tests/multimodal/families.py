"""Small models of families with vision and audio towers, and batches for them.

A batch is described by samples, and a sample by its parts: ``("text", 5)``, ``("image", (1, 4, 6))``,
``("video", (2, 4, 4))``, ``("audio", 90)``. Works with every supported release of transformers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

IMAGE, VIDEO, VISION_START, VISION_END, AUDIO, AUDIO_START, AUDIO_END, VIDEO_START, VIDEO_END = range(90, 99)
VOCABULARY = 99
MELS = 16
MERGE = 2

_TEXT = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_HEAD = {**_TEXT, "head_dim": 8}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
_INTERLEAVED = {"rope_parameters": {**_SECTIONS, "mrope_interleaved": True}}
_SIGHT = {"depth": 3, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32}
_WINDOWS = {"patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]}
_PLACES = {"num_position_embeddings": 16}
_DEEP = {**_SIGHT, **_PLACES, "deepstack_visual_indexes": [0, 1]}
_TOKENS = {
    "image_token_id": IMAGE, "video_token_id": VIDEO,
    "vision_start_token_id": VISION_START, "vision_end_token_id": VISION_END,
}  # fmt: skip
_STARTS = {
    "vision_start_token_id": VISION_START, "vision_end_token_id": VISION_END,
    "audio_start_token_id": AUDIO_START, "audio_end_token_id": AUDIO_END,
}  # fmt: skip
_LINEAR = {
    **_HEAD,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "rope_parameters": {**_SECTIONS, "partial_rotary_factor": 1.0, "mrope_interleaved": True},
}  # fmt: skip
_SOUND = {
    "num_mel_bins": MELS, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 24,
    "d_model": 16, "max_source_positions": 60, "n_window": 50, "output_dim": 32,
}  # fmt: skip


def _with_tower(text: dict[str, Any], vision: dict[str, Any], **others: Any) -> dict[str, Any]:
    return {"text_config": text, "vision_config": vision, **(others or _TOKENS)}


_SECTIONED = {**_TEXT, "rope_parameters": _SECTIONS}
#: By family: the name that its model and its configuration begin with, and what the latter is called with.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_vl": ("Qwen2VL", _with_tower(_SECTIONED, {"depth": 3, "embed_dim": 16, "num_heads": 2, "hidden_size": 32})),
    "qwen2_5_vl": ("Qwen2_5_VL", _with_tower(_SECTIONED, {**_SIGHT, **_WINDOWS})),
    "qwen3_vl": ("Qwen3VL", _with_tower({**_HEAD, **_INTERLEAVED}, _DEEP)),
    "qwen3_vl_moe": ("Qwen3VLMoe", _with_tower({**_HEAD, **_EXPERTS, **_INTERLEAVED}, _DEEP)),
    "qwen3_5": ("Qwen3_5", _with_tower(_LINEAR, {**_SIGHT, **_PLACES})),
    "qwen3_5_moe": (
        "Qwen3_5Moe",
        _with_tower({**_LINEAR, **_EXPERTS, "shared_expert_intermediate_size": 24}, {**_SIGHT, **_PLACES}),
    ),
    "glm4v": (
        "Glm4v",
        _with_tower(
            _SECTIONED, {**_SIGHT, "image_size": 56, "patch_size": 14},
            image_token_id=IMAGE, video_token_id=VIDEO, image_start_token_id=VISION_START, image_end_token_id=VISION_END,
            video_start_token_id=VIDEO_START, video_end_token_id=VIDEO_END,
        ),
    ),
    "qwen2_5_omni": (
        "Qwen2_5OmniThinker",
        _with_tower(
            _SECTIONED, {**_SIGHT, **_WINDOWS}, audio_config=_SOUND,
            image_token_index=IMAGE, video_token_index=VIDEO, audio_token_index=AUDIO, **_STARTS,
        ),
    ),
    "qwen3_omni_moe": (
        "Qwen3OmniMoeThinker",
        _with_tower(
            {**_HEAD, **_EXPERTS, **_INTERLEAVED}, _DEEP,
            audio_config={**_SOUND, "downsample_hidden_size": 8, "n_window_infer": 100},
            image_token_id=IMAGE, video_token_id=VIDEO, audio_token_id=AUDIO, **_STARTS,
        ),
    ),
}  # fmt: skip
SPEECH = ("qwen2_5_omni", "qwen3_omni_moe")

#: Batches by name: samples of parts.
BATCHES: dict[str, list[list[tuple[str, Any]]]] = {
    "images": [
        [("text", 3), ("image", (1, 4, 6)), ("text", 2), ("image", (1, 8, 4)), ("text", 4)],
        [("image", (1, 6, 6)), ("text", 5)],
    ],
    "video": [[("text", 3), ("video", (2, 4, 4)), ("text", 5)], [("text", 9)]],
    "both": [[("image", (1, 4, 4)), ("text", 3), ("video", (2, 4, 6)), ("text", 2)]],
    "text": [[("text", 9)], [("text", 6)]],
}
SOUNDS: dict[str, list[list[tuple[str, Any]]]] = {
    "audio": [[("text", 3), ("audio", 130), ("text", 4)], [("audio", 100), ("text", 2), ("audio", 61)]],
    "audio and images": [[("image", (1, 4, 6)), ("text", 2), ("audio", 90), ("text", 3)]],
}

#: Samples that share a row.
PACKED: list[list[tuple[str, Any]]] = [
    [("text", 3), ("image", (1, 4, 6)), ("text", 4)],
    [("image", (1, 6, 4)), ("text", 5)],
]
PACKED_SOUNDS: list[list[tuple[str, Any]]] = [
    [("text", 3), ("audio", 90), ("text", 2), ("image", (1, 4, 6)), ("text", 4)],
    [("image", (1, 6, 4)), ("text", 5), ("audio", 90), ("text", 1)],
]
_ROWS = {"pixel_values", "image_grid_thw", "input_features", "feature_attention_mask"}


def batches(family: str) -> dict[str, list[list[tuple[str, Any]]]]:
    """The batches that a family's processor can make; glm4v's model does not tell images from videos."""
    if family == "glm4v":
        return {name: BATCHES[name] for name in ("images", "video", "text")}
    return {**BATCHES, **(SOUNDS if family in SPEECH else {})}


def model(family: str, **changes: Any) -> Any:
    """A small model of a family, always with the same weights; ``changes`` are of the configuration."""
    name, values = FAMILIES[family]
    configuration = import_module(f"transformers.models.{family}.configuration_{family}")
    config = getattr(configuration, f"{name}Config")(**values, **changes)
    modeling = import_module(f"transformers.models.{family}.modeling_{family}")
    torch.manual_seed(0)
    made = getattr(modeling, f"{name}ForConditionalGeneration")(config).train()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return made


def batch(family: str, samples: list[list[tuple[str, Any]]], *, side: str = "right") -> dict[str, Any]:
    """What a processor and a collator give the model for these samples, padded on one side."""
    torch.manual_seed(1)
    rows, found = [], {"image": [], "video": [], "audio": []}
    for sample in samples:
        tokens: list[int] = []
        for kind, size in sample:
            if kind == "text":
                tokens += torch.randint(3, 89, (size,)).tolist()
            else:
                found[kind].append(size)
                tokens += _placeholders(family, kind, size)
        rows.append(tokens)
    length = max(map(len, rows))
    padded = [
        [0] * (length - len(row)) + row if side == "left" else row + [0] * (length - len(row)) for row in rows
    ]
    ids = torch.tensor(padded)
    inputs: dict[str, Any] = {
        "input_ids": ids,
        "attention_mask": (ids != 0).long(),
        "labels": ids.masked_fill(ids == 0, -100),
        "mm_token_type_ids": _types(ids),
    }
    _add_pictures(family, found, inputs)
    if found["audio"]:
        longest = max(found["audio"])
        inputs["input_features"] = torch.randn(len(found["audio"]), MELS, longest)
        lengths = torch.tensor(found["audio"])
        inputs["feature_attention_mask"] = (torch.arange(longest) < lengths[:, None]).long()
    return inputs


def samples_of_a_row(family: str) -> list[list[tuple[str, Any]]]:
    """The samples of `packed`."""
    return PACKED_SOUNDS if family in SPEECH else PACKED


def packed(family: str, positions: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """Samples in one row, as docs/multimodal.md packs them; ``positions`` are those of one sample."""
    parts, rows = [], []
    for sample in samples_of_a_row(family):
        whole = batch(family, [sample])
        text = torch.arange(whole["input_ids"].shape[1]).view(1, 1, -1)
        rows.append(torch.cat([text, positions(whole)]))
        parts.append(whole)
    names = {**dict.fromkeys(("input_ids", "labels", "mm_token_type_ids"), 1), **dict.fromkeys(_ROWS, 0)}
    joined = {
        name: torch.cat([part[name] for part in parts], at) for name, at in names.items() if name in parts[0]
    }
    return {**joined, "position_ids": torch.cat(rows, 2)}


def accepted(made: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs that the model's forward names; releases differ."""
    names = inspect.signature(type(made).forward).parameters
    return {name: value for name, value in inputs.items() if name in names}


def _types(ids: torch.Tensor) -> torch.Tensor:
    """1 for placeholders of images, 2 for those of videos, which are those of images in glm4v."""
    inside = ((ids == VIDEO_START).int() - (ids == VIDEO_END).int()).cumsum(1)
    return (ids == IMAGE).int() * (1 + inside).int() + 2 * (ids == VIDEO).int()


def _add_pictures(family: str, found: dict[str, list[Any]], inputs: dict[str, Any]) -> None:
    side = 14 if family.startswith(("qwen2", "glm")) else 16
    for kind, pixels in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        if found[kind]:
            grid = torch.tensor(found[kind])
            inputs[f"{kind}_grid_thw"] = grid
            inputs[pixels] = torch.randn(int(grid.prod(-1).sum()), 3 * 2 * side * side)
            if kind == "video" and "omni" in family:
                inputs["video_second_per_grid"] = torch.ones(len(grid))


def _placeholders(family: str, kind: str, size: Any) -> list[int]:
    if kind == "audio":
        if family == "qwen2_5_omni":
            count = ((size - 1) // 2 + 1 - 2) // 2 + 1
        else:
            left = (((size % 100 - 1) // 2 + 1 - 1) // 2 + 1 - 1) // 2 + 1 if size % 100 else 0
            count = left + size // 100 * 13
        return [AUDIO_START, *[AUDIO] * count, AUDIO_END]
    frames, height, width = size
    count = height * width // MERGE**2
    token = IMAGE if kind == "image" else VIDEO
    if kind == "video" and family == "glm4v":
        frame = [VISION_START, *[IMAGE] * count, VISION_END, 7]
        return [VIDEO_START, *frame * frames, VIDEO_END]
    if kind == "video" and family.startswith("qwen3") and "omni" not in family:
        # Each frame has a time before it.
        return [part for _ in range(frames) for part in (7, VISION_START, *[token] * count, VISION_END)]
    return [VISION_START, *[token] * (frames * count), VISION_END]
