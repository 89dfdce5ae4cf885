"""Inputs that reach what VeOmni patches: text, packed text, pictures and sound, and the same text without pictures."""

from __future__ import annotations

from typing import Any

import torch

from tests.veomni.configurations import (
    AUDIO,
    AUDIO_END,
    AUDIO_START,
    CLASSES,
    IMAGE,
    LABELS,
    MELS,
    VIDEO,
    VISION_END,
    VISION_START,
    patch,
)

#: The optimizer steps of a training.
STEPS = 20

#: Folders whose models take pictures; those that have text between the frames of a video.
SEES = {
    "qwen2_vl", "qwen2_5vl", "qwen2_5_omni", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe",
    "qwen3_omni_moe",
}  # fmt: skip
SEPARATE_FRAMES = {"qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"}
#: Those that find the places of pictures themselves.
FINDS = SEPARATE_FRAMES | {"qwen2_5vl"}
#: Linear attention takes packed sequences only.
PACKED_ONLY = {"qwen3_5", "qwen3_5_moe"}
#: How many tokens `FRAMES` frames of sound become.
HEARS = {"qwen2_5_omni": 10, "qwen3_omni_moe": 5}
FRAMES = 40


def inputs(folder: str, trained: str) -> dict[str, dict[str, Any]]:
    """What a class of a folder is called with, by name.

    ``dummy`` is ``packed`` for a rank of FSDP that got no picture: VeOmni's models then compute an empty one.
    ``unmasked`` leaves it to the model to find the places of pictures.
    """
    generator = torch.Generator().manual_seed(7)
    if trained != CLASSES[folder][0]:
        packed = _packed(folder, generator)
        if trained.endswith("ForSequenceClassification"):
            packed["labels"] = packed["labels"].where(packed["labels"] < 0, packed["labels"] % LABELS)
        if trained.endswith("ForCausalLM") and folder in SEES:
            packed["position_ids"] = packed["position_ids"][:, 0]
        return {"packed": packed}
    given = {"packed": _packed(folder, generator)}
    if folder not in PACKED_ONLY:
        given["text"] = _text(folder, generator)
    if folder in SEES:
        given["media"] = _media(folder, generator)
        given["dummy"] = given["packed"]
    if folder in FINDS:
        given["unmasked"] = {
            name: value for name, value in given["media"].items() if not name.endswith("_mask")
        }
        given["unmasked"]["attention_mask"] = given["media"]["attention_mask"]
    return given


def _text(folder: str, generator: torch.Generator) -> dict[str, Any]:
    """Two rows, the second one padded."""
    tokens = torch.randint(3, IMAGE, (2, 12), generator=generator)
    mask = torch.ones_like(tokens)
    mask[1, 9:] = 0
    given = {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}
    return given | _needs(folder, tokens)


def _packed(folder: str, generator: torch.Generator) -> dict[str, Any]:
    """One row of two sequences, as VeOmni's collator packs them."""
    lengths = (7, 9)
    tokens = torch.randint(3, IMAGE, (1, sum(lengths)), generator=generator)
    places = torch.cat([torch.arange(length) for length in lengths])[None]
    labels = tokens.clone()
    labels[0, lengths[0]] = -100
    given = {"input_ids": tokens, "labels": labels, **_edges(folder, *lengths), **_needs(folder, tokens)}
    return given | {
        "position_ids": places[:, None].expand(1, 3, -1).contiguous() if folder in SEES else places
    }


def _edges(folder: str, *lengths: int) -> dict[str, Any]:
    """Where the sequences of a packed row begin and end."""
    edges = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    # A model for NPUs makes this list with a module that cannot be imported without one.
    listed = {"cu_seqlens_list_q": edges.tolist()} if folder in PACKED_ONLY else {}
    return listed | {
        "cu_seq_lens_q": edges,
        "cu_seq_lens_k": edges,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
    }


def _media(folder: str, generator: torch.Generator) -> dict[str, Any]:
    """One row with an image, a video of two frames and, where the model hears, sound."""
    words = torch.randint(3, IMAGE, (16,), generator=generator).tolist()
    frame = [VISION_START, *[VIDEO] * 4, VISION_END]
    apart = folder in SEPARATE_FRAMES
    video = [*frame, words.pop(), *frame] if apart else [VISION_START, *[VIDEO] * 8, VISION_END]
    row = [*words[:3], VISION_START, *[IMAGE] * 4, VISION_END, *words[3:6], *video, *words[6:8]]
    sound = [AUDIO_START, *[AUDIO] * HEARS[folder], AUDIO_END] if folder in HEARS else []
    tokens = torch.tensor([[*row, *sound, *words[8:]]])
    given = {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "labels": tokens.masked_fill(tokens >= IMAGE, -100),
        "pixel_values": torch.randn(16, patch(folder), generator=generator),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
        "pixel_values_videos": torch.randn(32, patch(folder), generator=generator),
        "video_grid_thw": torch.tensor([[2, 4, 4]]),
    }
    if folder in PACKED_ONLY:
        given |= _edges(folder, tokens.shape[1])
    if folder in HEARS:
        given["input_features"] = torch.randn(FRAMES, MELS, generator=generator)
        given["audio_feature_lengths"] = torch.tensor([0, FRAMES])  # the video has no sound
    return given | _needs(folder, tokens)


def _needs(folder: str, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """What VeOmni's data pipeline adds for models that see or hear."""
    if folder not in SEES:
        return {}
    masks = {"image_mask": tokens == IMAGE, "video_mask": tokens == VIDEO}
    if folder not in HEARS:
        return masks
    rows, length = tokens.shape
    places = torch.arange(length).view(1, 1, -1).expand(rows, 3, -1).contiguous()
    return masks | {"audio_mask": tokens == AUDIO, "position_ids": places}
